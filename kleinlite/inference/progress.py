"""The bar that shows how far a drawing is."""

from collections.abc import Iterable, Iterator


def progress_bar(steps: int, show: bool) -> Iterable[int]:
    """The numbers of the steps, under a bar on stderr or in the notebook if `show` says so."""
    return show_bar(steps) if show else range(steps)


def show_bar(steps: int) -> Iterator[int]:
    """The same under a bar, which says until the first step is done what large models need a minute for."""
    from tqdm.auto import tqdm  # slow to import

    bar = tqdm(range(steps), "loading, reading the prompt", leave=False)
    for number in bar:
        yield number
        bar.set_description("drawing", refresh=False)
