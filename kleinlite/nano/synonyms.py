"""Other words that klein-nano has learned for what captions and instructions say in one way."""

SYNONYMS = {
    "circle": ("ball", "disc", "disk", "dot"), "square": ("box", "block", "cube"), "triangle": ("pyramid",),
    "diamond": ("rhombus",), "house": ("home", "cottage", "hut"), "boat": ("ship", "sailboat"),
    "sea": ("ocean", "water"), "dunes": ("sand", "desert"), "hills": ("meadows", "grass"),
    "red": ("crimson", "scarlet"), "blue": ("azure", "navy"), "purple": ("violet", "lilac"),
    "yellow": ("golden", "gold"), "orange": ("amber",), "green": ("emerald", "lime"), "pink": ("rose", "magenta"),
    "black": ("ebony",), "white": ("pale",), "above": ("over", "on top of"),
    "below": ("under", "beneath", "underneath"),
    "left of": ("to the left of",), "right of": ("to the right of",), "background": ("backdrop",),
    "by day": ("in daylight", "during the day"), "at sunset": ("at dusk", "in the evening"),
    "at night": ("by night", "in the dark"), "under": ("below", "beneath"), "remove": ("delete", "erase", "take away"),
    "add": ("put in", "place"), "make it night": ("turn it into night",), "turn": ("change",),
}  # fmt: skip
OPENINGS = ("a picture of ", "an image of ", "draw ", "show me ")
