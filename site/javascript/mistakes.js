// The mistakes of the atlas that this player can make: lines of klein.js, and what stands there wrongly.

/** [chapter, name in the atlas, [[right, wrong], …]] */
export const MISTAKES = [
  [1, "statistics left out", [["latents[from] * std + mean", "latents[from]"]]],
  [
    1,
    "row, column swapped",
    [["(2 * i + ((k >> 1) & 1)) * 2 * gw + 2 * j + (k & 1)", "(2 * i + (k & 1)) * 2 * gw + 2 * j + ((k >> 1) & 1)"]],
  ],
  [1, "MLX's group order", [["Math.floor(channel / size)", "channel % groups"]]],
  [2, "pairs by halves", [["this.turn(y, s, nh, hd, rope);", "this.turn(y, s, nh, hd, rope, 1, hd / 2);"]]],
  [2, "ids without h and w", [["[t, Math.floor(i / gw), i % gw, 0]", "[t, 0, 0, 0]"]]],
  [2, "h and w swapped", [["[t, Math.floor(i / gw), i % gw, 0]", "[t, i % gw, Math.floor(i / gw), 0]"]]],
  [5, "SwiGLU halves swapped", [["this.silu(x, wide);", "this.silu(x + wide, wide);"]]],
  [5, "shift and scale swapped", [["d, mod.last, 1, 0)", "d, mod.last, 0, 1)"]]],
  [5, "positions: picture first", [["[...textIds(m), ...ids]", "[...ids, ...textIds(m)]"]]],
  [5, "blocks: picture first", [["this.copy(qkv[i] + of.from,", "this.copy(qkv[i] + (of.from ? 0 : all * d),"]]],
  [5, "read from the front", [["this.modulate(x + m * d, n, d, mod.last", "this.modulate(x, n, d, mod.last"]]],
  [5, "epsilon 1e-5", [["Math.sqrt(sum / d + 1e-6)", "Math.sqrt(sum / d + 1e-5)"]]],
];

/** The source of klein.js with a mistake in it. */
export function spoil(source, name) {
  const [, , lines] = MISTAKES.find(([, its]) => its === name);
  for (const [right, wrong] of lines) {
    if (source.split(right).length !== 2) throw new Error(`klein.js must have “${right}” once.`);
    source = source.replace(right, () => wrong);
  }
  return source;
}
