// Changing a part of a picture, as kleinlite/inference/masks.py does.
// A mask is (H, W) of 0, what stays, and 255, what is drawn anew.

/** 1 where a token is drawn anew, 0 where it stays, (gh · gw): the mean of the four pixels around each token's middle. */
export function tokenMask(mask, width, height) {
  const gw = width / 16;
  return Float32Array.from({ length: (gw * height) / 16 }, (_, i) => {
    const at = (16 * Math.floor(i / gw) + 7) * width + 16 * (i % gw) + 7;
    return [at, at + 1, at + width, at + width + 1].reduce((sum, pixel) => sum + (mask[pixel] >= 128 ? 0.25 : 0), 0);
  });
}

/** What was drawn, where the mask is white; the picture itself, to the bit, where it is black. (H, W, 4) both. */
export function paste(drawn, picture, mask) {
  return drawn.map((level, i) => (mask[i >> 2] ? level : picture[i]));
}
