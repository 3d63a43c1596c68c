"""The one file that a try may change: how a transformer learns to draw, within the time that is given.

At most 200 lines, and only the imports that rules.py lists; program.md says the rest.
"""

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_map

from kleinlite.training import encode_batch, flow_loss, initialize, make_optimizer, training_step
from kleinlite.transformer import Transformer, TransformerConfig

from .given import Given

NETWORK = TransformerConfig(
    double_blocks=2, single_blocks=4, heads=4, axes=(8, 8, 8, 8), d_text=288, mlp_ratio=2.0
)  # fmt: skip
SCENES = 6000
BATCH = 32
MUON = 0.02  # the peak of its learning rate
ADAM = 2e-3
SHIFT = 3.0  # how far the noise levels are pushed towards noise
DECAY = 0.99  # of the weights' moving average, which is what draws
DRAW_STEPS = 8
GUIDANCE = 2.5
SMALL_AT_FIRST = (  # matrices whose output is added to something
    "linear2", "proj", "img_mlp.2", "txt_mlp.2", "final_layer.linear", "adaLN_modulation.1", "lin"
)  # fmt: skip


def rate_at(share: float) -> float:
    """The learning rate over its peak after this share of the time: up for 2 %, level, and down over the last half."""
    return max(0.01, min(share / 0.02, 1.0, 2 * (1 - share)))


def train(given: Given) -> None:
    """Learn until the time is over, and save."""
    model = Transformer(NETWORK)
    initialize(model, mx.random.key(given.seed), damp=SMALL_AT_FIRST, damping=0.2)
    muon = optim.Muon(MUON, momentum=0.95, weight_decay=0.0)
    adam = make_optimizer(ADAM)
    optimizer = optim.MultiOptimizer([muon, adam], [lambda name, w: "blocks" in name and w.ndim == 2])

    def loss(model: Transformer, clean: mx.array, references: mx.array, *rest: mx.array) -> mx.array:
        *words, key = rest
        batch = encode_batch(model, given.text_encoder, given.grid, clean, references, *words)
        return flow_loss(model, batch, key, SHIFT)

    update = training_step(model, optimizer, loss)
    curriculum = given.curriculum(BATCH, SCENES)
    average = model.trainable_parameters()
    step = 0
    while (share := given.share) < 1:
        muon.learning_rate = MUON * rate_at(share)
        adam.learning_rate = ADAM * rate_at(share)
        update(*curriculum(step))
        decay = min(DECAY, (1 + step) / (10 + step))
        average = tree_map(
            lambda a, w, d=decay: d * a + (1 - d) * w, average, model.trainable_parameters()
        )  # fmt: skip
        mx.eval(model.state, optimizer.state, average)
        step += 1
    model.update(average)
    given.save(model, DRAW_STEPS, GUIDANCE, step)
