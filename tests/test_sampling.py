"""Properties of schedule, Euler loop, guidance and noise; numbers against diffusers stand in test_parity_blocks."""

import math

import mlx.core as mx
import pytest
from golden_tools import check

from kleinlite.sampling import classifier_free_guidance, empirical_mu, euler, noise, noised, schedule, shift_time

# width, height, steps: mu, and the first noise levels after 1 (or the last before 0, counted from the end)
PUBLISHED = [
    (256, 256, 4, 1.965567161, {1: 0.9553908, 2: 0.8771343, 3: 0.7041117}),
    (512, 512, 4, 2.030689708, {1: 0.9580853, 2: 0.8839819, 3: 0.7174966}),
    (768, 768, 4, 2.139227286, {1: 0.9622337, 2: 0.8946578, 3: 0.7389687}),
    (1024, 768, 4, 2.204349832, {1: 0.9645303, 2: 0.9006394, 3: 0.7513336}),
    (1024, 1024, 4, 2.291179894, {1: 0.9673840, 2: 0.9081439, 3: 0.7671999}),
    (1360, 768, 4, 2.289823174, {1: 0.9673412, 2: 0.9080306, 3: 0.7669576}),
    (1408, 800, 4, 1.201454660, {1: 0.9088826, 2: 0.7687834, 3: 0.5256879}),
    (1536, 1024, 4, 1.496661540, {1: 0.9305568, 2: 0.8170760, 3: 0.5982189}),
    (2048, 2048, 4, 3.229986340, {1: 0.9869856, 2: 0.9619472, 3: 0.8939154}),
    (1024, 1024, 8, 2.267890439, {1: 0.9854255, 2: 0.9666411, 3: 0.9415147, 4: 0.9061826, 7: 0.5798068}),
    (512, 512, 50, 1.701956207, {1: 0.9962928, 4: 0.9843930, -4: 0.2593059, -3: 0.1860176, -2: 0.1006644}),
    (1024, 1024, 50, 2.023351157, {1: 0.9973091, 4: 0.9886339, -4: 0.3255933, -3: 0.2396312, -2: 0.1337190}),
]


@pytest.mark.parametrize("width, height, steps, mu, levels", PUBLISHED)
def test_published_schedules(width, height, steps, mu, levels):
    n = width * height // 256
    assert abs(empirical_mu(n, steps) - mu) < 1e-8
    sigmas = schedule(steps, n)
    assert all(abs(sigmas[i] - level) < 2e-7 for i, level in levels.items())


@pytest.mark.parametrize("n", [1, 24, 1024, 4300, 4301, 16384])
@pytest.mark.parametrize("steps", [1, 2, 4, 50])
def test_schedule_falls_from_1_to_0(n, steps):
    sigmas = schedule(steps, n)
    assert len(sigmas) == steps + 1 and sigmas[0] == 1 and sigmas[-1] == 0
    assert all(a > b for a, b in zip(sigmas, sigmas[1:]))
    assert all(a > 1 - i / steps for i, a in enumerate(sigmas[1:-1], 1))  # the shift stays longer in the noise


def test_mu_jumps_after_4300_tokens():
    assert empirical_mu(4300, 4) - empirical_mu(4301, 4) > 1
    assert empirical_mu(4301, 4) == empirical_mu(4301, 50) != empirical_mu(4300, 50)


@pytest.mark.parametrize("steps", [1, 3, 8])
def test_euler_is_exact_on_straight_paths(steps):
    """x = (1 - t)·data + t·noise has velocity noise - data everywhere: any number of steps ends at the data."""
    data, start = (mx.random.normal((2, 5, 3), key=mx.random.key(i)) for i in range(2))
    taken = list(euler(lambda x, t, *_: start - data, start, schedule(steps, 64)))
    check(taken[-1].latents, data)
    for step in taken:
        check(step.latents, (1 - step.t_next) * data + step.t_next * start)
        check(step.latents - step.t_next * step.velocity, data)  # what a preview shows


def test_euler_works_step_by_step():
    calls = []
    x = mx.ones((1, 2, 3))
    steps = euler(lambda x, t, *_: calls.append(t) or x, x, [1.0, 0.5, 0.0])
    first = next(steps)
    assert calls == [1.0] and (first.index, first.t, first.t_next) == (0, 1.0, 0.5)
    check(first.latents, 0.5 * x)
    assert [s.index for s in steps] == [1] and calls == [1.0, 0.5]


def test_euler_keeps_the_type_and_adds_in_float32():
    x, v = (mx.random.normal((500,), key=mx.random.key(i)).astype(mx.bfloat16) for i in range(2))
    [step] = euler(lambda x, t, *_: v, x, [1.0, 0.7175])
    exact = x.astype(mx.float32) - 0.2825 * v.astype(mx.float32)
    assert step.latents.dtype == mx.bfloat16
    check(step.latents, exact.astype(mx.bfloat16), 0)


def test_guidance():
    cond, uncond = (mx.random.normal((1, 4, 8), key=mx.random.key(i)) for i in range(2))
    check(classifier_free_guidance(cond, uncond, 1.0), cond)
    check(classifier_free_guidance(cond, uncond, 0.0), uncond, 0)
    check(classifier_free_guidance(cond, uncond, 4.0), 4 * cond - 3 * uncond)


def test_noise():
    x = noise(7, 24)
    assert x.shape == (1, 24, 128) and x.dtype == mx.float32
    check(x, noise(7, 24), 0)
    assert not mx.array_equal(x, noise(8, 24)).item()
    many = noise(3, 1000)
    assert abs(many.mean().item()) < 0.01 and abs(math.sqrt(many.var().item()) - 1) < 0.01
    # A seed means the same picture on every machine and in every version, so these three must never change.
    check(x[0, 0, :3], [1.3462508, 1.6741043, 0.3736329])


def test_shift_time_keeps_both_ends_and_moves_towards_the_noise():
    assert shift_time(0.0, 3.0) == 0 and shift_time(1.0, 3.0) == 1
    assert math.isclose(shift_time(0.5, 3.0), 0.75)


def test_noised_mixes_each_picture_by_its_own_level():
    clean, eps = (mx.random.normal((2, 5, 3), key=mx.random.key(i)) for i in range(2))
    mixed = noised(clean, eps, mx.array([0.0, 1.0]))
    check(mixed[0], clean[0])
    check(mixed[1], eps[1])
    check(noised(clean, eps, 0.25), 0.75 * clean + 0.25 * eps)
