"""The losses of chapter 12 mean what they say."""

import mlx.core as mx
import pytest
from small_nano import GRID, small_world  # noqa: F401, a fixture

from kleinlite.distillation import distill_loss, guided_mean_velocity, own_path
from kleinlite.sampling import classifier_free_guidance, euler, schedule
from kleinlite.text_encoder import tokenize
from kleinlite.training import Batch, encode_batch


class Net:
    """A network that answers velocity(img, txt, t)."""

    def __init__(self, velocity):
        self.velocity = velocity

    def rope(self, img_ids, txt_ids):
        return None

    def __call__(self, img, txt, t, rope):
        return self.velocity(img, txt, t)


def guidance_of(b):
    """Every second picture is guided."""
    return mx.where(mx.arange(b) % 2 == 0, 3.0, 1.0)


def loss_of(world, student, teacher, step, turn=1):
    tokenizer, _, encoder, _, data = world
    *arrays, key = data(turn)
    batch = encode_batch(teacher, encoder, GRID, *arrays)
    empty = encoder(*tokenize(tokenizer, [""], 32))
    return distill_loss(student, teacher, batch, empty, guidance_of(len(batch.clean)), step, key).item()


@pytest.mark.parametrize("step", [0, 1, 2, 3])
@pytest.mark.parametrize("turn", [1, 3])  # pictures, and edits, whose references are no part of the answer
def test_nothing_to_learn_from_a_constant_field(world, step, turn):
    def constant(value):
        return Net(lambda img, txt, t: mx.full(img.shape, value))

    assert loss_of(world, constant(0.5), constant(0.5), step, turn) < 1e-9
    assert loss_of(world, constant(1.5), constant(0.5), step, turn) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("step", [0, 1, 2, 3])
@pytest.mark.parametrize("turn", [1, 3])
def test_the_student_learns_the_guided_answer(world, step, turn):
    """The teacher answers by prompt; the student is told the guided mean, of each picture with its own guidance."""
    empty = world[2](*tokenize(world[0], [""], 32))

    def asked(txt):
        return mx.any(txt != empty, axis=(1, 2)).astype(mx.float32)[:, None, None]

    def each(txt):
        return guidance_of(len(txt))[:, None, None]

    teacher = Net(lambda img, txt, t: mx.ones(img.shape) * asked(txt))
    guided = Net(
        lambda img, txt, t: classifier_free_guidance(asked(txt), 0 * asked(txt), each(txt)) * mx.ones(img.shape)
    )
    assert loss_of(world, guided, teacher, step, turn) < 1e-9
    assert loss_of(world, teacher, teacher, step, turn) > 0.1


@pytest.mark.parametrize("step", [0, 1, 2, 3])
def test_a_step_begins_at_its_noise_level(world, step):
    """The student is asked once, at x = (1 − t)·clean + t·noise, with t where its step begins."""
    clean, _, _, _, key = world[4](1)
    t, eps = schedule(4, 36)[step], mx.random.normal(clean.shape, key=key)
    asked = []

    def velocity(img, txt, time):
        asked.append(time == t and mx.allclose(img[:, : clean.shape[1]], (1 - t) * clean + t * eps, atol=1e-5).item())
        return img

    loss_of(world, Net(velocity), Net(lambda img, txt, time: img), step)
    assert asked == [True]


@pytest.mark.slow
def test_a_compiled_loss_has_a_graph_for_each_step():
    """`segment` is a plain number: `mx.compile` must not mistake one step for another."""
    constant = Net(lambda img, txt, t: mx.full(img.shape, t))
    zero = Net(lambda img, txt, t: mx.zeros(img.shape))
    batch = Batch(mx.zeros((2, 36, 128)), mx.zeros((2, 1, 8)), None)
    guidance = mx.ones((2,))
    loss = mx.compile(lambda key, segment: distill_loss(constant, zero, batch, batch.txt[:1], guidance, segment, key))
    times = schedule(4, 36)
    for segment in (0, 3, 1, 0, 2, 3):
        assert loss(mx.random.key(0), segment).item() == pytest.approx(times[segment] ** 2, rel=1e-3)


def test_mean_velocity_leads_where_two_steps_lead():
    """A field that turns on the way: the mean velocity must end where two Euler steps of half the length end."""
    x, txt = mx.random.normal((2, 4, 3), key=mx.random.key(0)), mx.zeros((2, 1, 1))

    def field(x, t, *_):
        return t * x + 1

    v = guided_mean_velocity(
        Net(lambda img, txt, t: field(img, t)), x, Batch(x, txt, None, mx.zeros((2, 0, 3))), txt[:1], 0.9, 0.5, 2.0
    )
    half = x - 0.2 * field(x, 0.9)
    assert mx.allclose(x - 0.4 * v, half - 0.2 * field(half, 0.7), atol=1e-5)


def test_a_path_is_what_the_sampler_walks():
    def field(x, t, *_):
        return t * x + 1

    net = Net(lambda img, txt, t: field(img, t))
    noise = mx.random.normal((2, 36, 3), key=mx.random.key(0))
    batch = Batch(noise, mx.zeros((2, 1, 1)), None, mx.zeros((2, 5, 3)))  # references are no part of it
    path = own_path(net, noise, batch)
    assert len(path) == 5 and path[0] is noise
    *_, last = euler(field, noise, schedule(4, 36))
    assert mx.allclose(path[-1], last.latents, atol=1e-5)
