"""A step in mflux, with kleinlite's fast BLAS for MLX. Started by `benchmarks.peers`."""

from collections.abc import Callable

import mlx.core as mx
from loop import HEADS, TEXT_TOKENS, TOKENS, serve

from kleinlite.cpu import setup
from kleinlite.position_ids import image_ids, text_ids

DTYPE = mx.float32 if mx.default_device() == mx.Device(mx.cpu) else mx.bfloat16


def step() -> Callable[[], None]:
    from mflux.models.common.config.model_config import ModelConfig
    from mflux.models.flux2.model.flux2_transformer.transformer import Flux2Transformer

    ModelConfig.precision = DTYPE
    net = Flux2Transformer(num_layers=1, num_single_layers=2, num_attention_heads=HEADS, joint_attention_dim=7680)
    net.set_dtype(DTYPE)
    mx.eval(net.parameters())

    def normal(*shape):
        return mx.random.normal(shape, key=mx.random.key(0)).astype(DTYPE)

    img, txt, ids = normal(1, TOKENS, 128), normal(1, TEXT_TOKENS, 7680), (image_ids(32, 32), text_ids(TEXT_TOKENS))
    mx.eval(img, txt, ids)
    run = mx.compile(lambda img, txt: net(img, txt, mx.array([0.5], dtype=DTYPE), *ids))
    return lambda: mx.eval(run(img, txt))


if __name__ == "__main__":
    from importlib.metadata import version

    setup()  # kleinlite's fast BLAS
    serve({"step": step}, f"mflux {version('mflux')}, MLX {mx.__version__}, {mx.default_device()}")
