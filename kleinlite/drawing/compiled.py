"""The velocity field as one graph for all steps, for a GPU. Hand-written; not timed by us, for want of one."""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

__all__ = ["compile_on_gpu"]

Field = Callable[[mx.array, float], mx.array]  # x, t → velocity


def compile_field(field: Field, network: nn.Module) -> Field:
    """The same function, its small operations joined into a few kernels; built at the first step, used by the others.

    network: whose weights it reads. They are read from their files now, or that would be part of every step.
    """
    mx.eval(network.parameters())
    compiled = mx.compile(field)
    return lambda x, t: compiled(x, mx.array(t))  # as an array: of a number, each step would have its own graph


def compile_on_gpu(field: Field, network: nn.Module) -> Field:
    """`compile_field`, except on a CPU: there the functions of `kleinlite.cpu` are compiled already, and do better."""
    return field if mx.default_device() == mx.Device(mx.cpu) else compile_field(field, network)
