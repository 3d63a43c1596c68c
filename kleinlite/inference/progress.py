"""The bar that shows how far a drawing is."""

from collections.abc import Iterator


def progress_bar(steps: int, show: bool) -> Iterator[int]:
    """The numbers of the steps, if `show` says so under a bar, which speaks before the first step is done."""
    if not show:
        yield from range(steps)
        return
    from tqdm.auto import tqdm  # slow to import

    bar = tqdm(range(steps), "loading, reading the prompt", leave=False)
    for number in bar:
        yield number
        bar.set_description("drawing", refresh=False)
