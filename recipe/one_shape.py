"""One shape per picture: is it the one that was asked for, and how well is it drawn?"""

from PIL import Image

from kleinlite.nano.shapes import area, cut_out, overlaps, ripple
from kleinlite.scenes import BACKGROUNDS, COLORS, SHAPES, Scene, Thing, captions


def one_shape_cases() -> list[tuple[Scene, str]]:
    """84 prompts of one shape: every kind in every color that a pale background leaves visible, and some more."""
    found = []
    for i, kind in enumerate(SHAPES):
        for j, color in enumerate(COLORS):
            free = [name for name in BACKGROUNDS if name != color]
            scene = Scene((Thing(kind, color, "center"),), background=free[(i + j) % len(free)], jitter=100 * i + j)
            said = captions(scene)
            found.append((scene, said[1]))
            if (i + j) % 9 in (0, 2, 4, 6, 8):
                found.append((scene, f"{said[1]} on a {scene.background} background"))
    return found


def one_shape(image: Image.Image, asked: Thing) -> tuple[bool, float, float]:
    """Whether the largest thing has the asked kind and color; its overlap with the asked kind; the ripple."""
    found = cut_out(image)
    if not found:
        return False, 0.0, ripple(image)
    color, mask = max(found, key=lambda cut: area(cut[1]))
    by_kind = overlaps(mask)
    right = max(by_kind, key=by_kind.__getitem__) == asked.kind
    return right and color == asked.color, by_kind[asked.kind], ripple(image)


def summary(results: list[tuple[bool, float, float]]) -> dict[str, float]:
    """Right kinds and their number, mean overlap, the mean of its worst tenth, and the mean ripple."""
    overlaps = sorted(iou for _, iou, _ in results)
    worst = overlaps[: max(1, len(overlaps) // 10)]
    return {
        "right": sum(ok for ok, _, _ in results), "count": len(results), "iou": sum(overlaps) / len(overlaps),
        "worst": sum(worst) / len(worst), "ripple": sum(r for *_, r in results) / len(results),
    }  # fmt: skip
