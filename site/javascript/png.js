// A PNG file that remembers what made it, as kleinlite writes them. Not by the canvas: some browsers change what is
// read from it, so that nobody can tell visitors apart.
import { ADAPTER } from "./world.js";

const TABLE = Uint32Array.from({ length: 256 }, (_, n) => {
  for (let k = 0; k < 8; k++) n = n & 1 ? 0xedb88320 ^ (n >>> 1) : n >>> 1;
  return n;
});
const crc = (bytes) => ~bytes.reduce((sum, byte) => TABLE[(sum ^ byte) & 255] ^ (sum >>> 8), -1);

function chunk(kind, content) {
  const bytes = new Uint8Array(12 + content.length),
    view = new DataView(bytes.buffer);
  view.setUint32(0, content.length);
  bytes.set(new TextEncoder().encode(kind), 4);
  bytes.set(content, 8);
  view.setUint32(8 + content.length, crc(bytes.subarray(4, 8 + content.length)));
  return bytes;
}

/** A Blob of the picture; `about` is stored as text under the name kleinlite. */
export async function png({ rgba, width, height }, about) {
  const head = new Uint8Array(13),
    rows = new Uint8Array(height * (3 * width + 1)); // a row begins with its filter, none
  new DataView(head.buffer).setUint32(0, width);
  new DataView(head.buffer).setUint32(4, height);
  head.set([8, 2], 8); // 8 bits, RGB
  for (let i = 0; i < height; i++) {
    for (let j = 0; j < width; j++) {
      rows.set(rgba.subarray((i * width + j) * 4, (i * width + j) * 4 + 3), i * (3 * width + 1) + 1 + 3 * j);
    }
  }
  const packed = new Blob([rows]).stream().pipeThrough(new CompressionStream("deflate"));
  const data = new Uint8Array(await new Response(packed).arrayBuffer()),
    text = new TextEncoder().encode(`kleinlite\0\0\0\0\0${about}`);
  const signature = Uint8Array.of(137, 80, 78, 71, 13, 10, 26, 10);
  return new Blob(
    [signature, chunk("IHDR", head), chunk("iTXt", text), chunk("IDAT", data), chunk("IEND", new Uint8Array())],
    { type: "image/png" },
  );
}

/** What `kleinlite generate --like` reads: the arguments of a call. A seed may be larger than JSON.stringify writes. */
export function describe({ model, prompt, seed, steps, guidance, width, height, reference, mask, lora }) {
  const rest = JSON.stringify({
    model,
    prompt,
    steps,
    guidance,
    negative_prompt: "",
    width,
    height,
    references: reference ? 1 : 0,
    ...(mask && { strength: 1, mask: true }),
    ...(lora && { loras: [ADAPTER] }),
  });
  return `{"seed":${seed},${rest.slice(1)}`;
}
