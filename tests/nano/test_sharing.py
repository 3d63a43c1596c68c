"""Sharing a training step between two cores changes neither its numbers nor the names of the weights."""

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from small_nano import GRID, small_world  # noqa: F401, a fixture

from kleinlite.cpu import FAST, two_streams
from kleinlite.cpu.blas import limit_threads
from kleinlite.nano.run import Run
from kleinlite.nano.sharing import share_blocks, share_matrices
from kleinlite.training import flow_loss, flow_optimizer, initialize
from kleinlite.transformer import SingleBlock, Transformer


@pytest.fixture(name="threads")
def two_threads():
    before = limit_threads(2)
    yield
    limit_threads(before)


@pytest.mark.skipif(not FAST, reason="only a Linux CPU is shared")
def test_a_shared_step_is_the_same_step(tmp_path, world, threads, monkeypatch):
    *_, text_encoder, transformer, data = world
    loss = lambda model, *batch: flow_loss(model, text_encoder, GRID, *batch)
    whole, rows = SingleBlock.__call__, []
    monkeypatch.setattr(SingleBlock, "__call__", lambda self, x, *rest: rows.append(len(x)) or whole(self, x, *rest))

    def train(name: str) -> tuple[dict[str, mx.array], list[float]]:
        net = Transformer(transformer._cfg)
        initialize(net, mx.random.key(9))
        run = Run(tmp_path / name, share_blocks(net), share_matrices(flow_optimizer(20)))
        rows.clear()
        losses = list(run.steps(4, loss, data))
        return dict(tree_flatten(run._trees())), losses

    plain, losses = train("a.safetensors")
    assert rows[0] == 8
    with two_streams():
        assert limit_threads(None) == 1
        shared, others = train("b.safetensors")
    assert rows[:2] == [4, 4] and limit_threads(None) == 2
    assert others == pytest.approx(losses, abs=1e-5)
    assert list(plain) == list(shared) and all(mx.allclose(plain[k], shared[k], atol=1e-4) for k in plain)


@pytest.mark.skipif(not FAST, reason="only a Linux CPU is shared")
def test_a_program_that_was_given_one_thread_keeps_to_it(threads):
    limit_threads(1)
    with two_streams():
        assert limit_threads(None) == 1
        from kleinlite.cpu import streams

        assert not streams._sharing
