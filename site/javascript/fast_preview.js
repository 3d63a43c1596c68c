// A preview that costs nothing, as kleinlite/inference/fast_preview.py has it: one matrix instead of the decoder.

const BLOCKS = 4; // per side of a token

/** Latents (gh·gw, c) → a small picture {rgba (4·gh, 4·gw, 4), width, height}. matrix: (c + 1, 48), its last row the bias. */
export function preview(matrix, latents, gh, gw) {
  const many = 3 * BLOCKS ** 2,
    c = matrix.length / many - 1,
    width = BLOCKS * gw,
    height = BLOCKS * gh,
    rgba = new Uint8ClampedArray(4 * width * height).fill(255);
  for (let i = 0; i < gh * gw; i++) {
    for (let k = 0; k < many; k++) {
      let value = matrix[c * many + k];
      for (let j = 0; j < c; j++) value += latents[i * c + j] * matrix[j * many + k];
      const row = BLOCKS * Math.floor(i / gw) + Math.floor(k / (3 * BLOCKS)),
        column = BLOCKS * (i % gw) + (Math.floor(k / 3) % BLOCKS);
      rgba[4 * (row * width + column) + (k % 3)] = 255 * (value / 2 + 0.5); // a clamped array rounds halves to even
    }
  }
  return { rgba, width, height };
}
