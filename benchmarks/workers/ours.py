"""The stages in kleinlite. Started by `benchmarks.peers`."""

import sys
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
from loop import BATCH, COPY, HEAD_SIZE, HEADS, PRODUCT, PROMPT, SMALL, TEXT_TOKENS, TOKENS, WIDTH, peak_bytes, serve
from mlx.utils import tree_flatten

from kleinlite import Klein, __version__
from kleinlite.autoencoder import Autoencoder, AutoencoderConfig
from kleinlite.cpu import attention, bfloat16_name, blas_name, setup, silu, speed_up
from kleinlite.inference.strips import use_strips
from kleinlite.models.formats import load_weights
from kleinlite.models.quantize_network import quantize
from kleinlite.position_ids import image_ids, text_ids
from kleinlite.quantization import QUANT_SPECS
from kleinlite.text_encoder import TextEncoder, TextEncoderConfig
from kleinlite.transformer import Transformer, TransformerConfig, modulate

ON_CPU = mx.default_device() == mx.Device(mx.cpu)
DTYPE = mx.float32 if ON_CPU else mx.bfloat16


def normal(*shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(0)).astype(DTYPE)


def timed(function: Callable[..., mx.array], *inputs: mx.array) -> Callable[[], None]:
    mx.eval(inputs)
    return lambda: mx.eval(function(*inputs))


def product() -> Callable[[], None]:
    rows, inputs, outputs = PRODUCT
    return timed(lambda x, w: x @ w.T, normal(rows, inputs), normal(outputs, inputs))


def copy() -> Callable[[], None]:
    return timed(lambda x: x + 1, normal(COPY))


def attention_fn() -> Callable[[], None]:
    heads = normal(3, 1, TOKENS + TEXT_TOKENS, HEADS, HEAD_SIZE).swapaxes(2, 3)
    return timed(lambda q, k, v: attention(q, k, v, HEAD_SIZE**-0.5), *heads)


def swiglu() -> Callable[[], None]:
    both = normal(1, TOKENS + TEXT_TOKENS, 6 * WIDTH)
    return timed(lambda x: silu(x[..., : 3 * WIDTH]) * x[..., 3 * WIDTH :], both)


def modulation() -> Callable[[], None]:
    return timed(modulate, normal(1, TOKENS + TEXT_TOKENS, WIDTH), normal(1, 1, WIDTH), normal(1, 1, WIDTH))


def step(bits: int | None = None) -> Callable[[], None]:
    net = Transformer(TransformerConfig(double_blocks=1, single_blocks=2))
    net.set_dtype(mx.bfloat16 if bits == 16 else DTYPE)
    if bits == 16:  # as in the files of the released models
        load_weights(net, dict(tree_flatten(net.parameters())), DTYPE, keep_narrow=True)
    elif bits:
        quantize(net, QUANT_SPECS[bits], DTYPE)
    speed_up(net)  # as a loaded network
    rope = net.rope(image_ids(32, 32), text_ids(TEXT_TOKENS))
    mx.eval(net.parameters(), rope)
    inputs = normal(1, TOKENS, 128), normal(1, TEXT_TOKENS, 7680), mx.array([0.5])

    def run(img, txt, t):
        return net(img, txt, t, rope=rope)

    return timed(run if ON_CPU else mx.compile(run), *inputs)  # as `Klein` does


def training_step() -> Callable[[], None]:
    net = Transformer(TransformerConfig(**SMALL))
    net.set_dtype(DTYPE)
    mx.eval(net.parameters())
    rope = net.rope(image_ids(6, 6), text_ids(32))

    def loss(net, img, txt, t):
        return net(img, txt, t, rope=rope).square().mean()

    gradients = nn.value_and_grad(net, loss)
    step = mx.compile(lambda *batch: gradients(net, *batch), inputs=net.state, outputs=net.state)
    inputs = [normal(BATCH, 36, 128), normal(BATCH, 32, SMALL["d_text"]), mx.full((BATCH,), 0.5)]
    mx.eval(inputs)
    return lambda: mx.eval(step(*inputs))


def picture() -> Callable[[], object]:
    klein = Klein.from_pretrained()
    return lambda: klein(PROMPT, seed=7, progress=False)


def decode(side: int) -> Callable[[], Callable[[], None]]:
    def prepare() -> Callable[[], None]:
        net = Autoencoder(AutoencoderConfig()).eval()
        mx.eval(net.parameters())
        use_strips(net)  # as a loaded model does
        return timed(net.decode, mx.random.normal((1, side // 16, side // 16, 128), key=mx.random.key(0)))

    return prepare


def text_encoder() -> Callable[[], None]:
    layers = int(sys.argv[2])
    net = TextEncoder(TextEncoderConfig(vocab=1000, layers=1, out_layers=(layers,)))
    net.layers *= layers  # one layer's weights, again and again: no processor's cache holds them either way
    net.set_dtype(DTYPE)
    speed_up(net)
    mx.eval(net.parameters())
    ids = mx.random.randint(0, 1000, (1, TEXT_TOKENS), key=mx.random.key(0))
    return timed(net, ids, mx.ones((1, TEXT_TOKENS), dtype=mx.bool_))


STAGES = {
    "product": product, "copy": copy, "attention": attention_fn, "silu · up": swiglu, "modulated norm": modulation,
    "step": step, "step, bfloat16": lambda: step(16), "step, 8 bits": lambda: step(8), "step, 4 bits": lambda: step(4),
    "training": training_step, "picture": picture, "decode 256²": decode(256), "decode 512²": decode(512),
    "text encoder": text_encoder,
}  # fmt: skip

if __name__ == "__main__":
    setup()  # the fast BLAS, before the first large array
    on_cpu = f"{blas_name() or 'its own BLAS'}, bfloat16: {bfloat16_name() or 'in float32'}"
    where = on_cpu if ON_CPU else "bfloat16, compiled"
    versions = f"kleinlite {__version__}, MLX {mx.__version__}, {mx.default_device()}, {where}"
    serve(STAGES, versions, peak_bytes if ON_CPU else mx.get_peak_memory)
