// Weights as they travel: safetensors, zipped, in which a matrix is 8-bit numbers and a scale for each of its rows.

/** The bytes of a packed file → those of a safetensors file with float32 matrices, which klein.js reads. */
export async function unpack(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip")),
    buffer = await new Response(stream).arrayBuffer(),
    size = Number(new DataView(buffer).getBigUint64(0, true)),
    header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, size)));
  const tensor = ({ data_offsets: [from, to] }) => buffer.slice(8 + size + from, 8 + size + to),
    entries = {},
    parts = [];
  let at = 0;
  for (const [name, entry] of Object.entries(header)) {
    if (header[name.replace(/\.scale$/, "")]?.dtype === "I8" && entry.dtype !== "I8") continue; // a scale
    let values = tensor(entry),
      { dtype } = entry;
    if (dtype === "I8") {
      const scales = new Float32Array(tensor(header[`${name}.scale`])),
        codes = new Int8Array(values),
        many = codes.length / scales.length,
        weights = new Float32Array(codes.length);
      for (let row = 0, i = 0; row < scales.length; row++) {
        for (const scale = scales[row], end = i + many; i < end; i++) weights[i] = codes[i] * scale;
      }
      values = weights.buffer;
      dtype = "F32";
    }
    entries[name] = { dtype, shape: entry.shape, data_offsets: [at, at += values.byteLength] };
    parts.push(values);
  }
  const head = new TextEncoder().encode(JSON.stringify(entries)),
    start = new Uint8Array(8 + Math.ceil(head.length / 8) * 8).fill(32);
  new DataView(start.buffer).setBigUint64(0, BigInt(start.length - 8), true);
  start.set(head, 8);
  return new Blob([start, ...parts]).arrayBuffer();
}
