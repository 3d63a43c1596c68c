// FLUX.2 [klein] in JavaScript, without a library: chapters 1 to 6 of the book once more, for a page that draws.
//
// One Float32Array is all the memory, `M`. An array is the place where it begins in M; what it looks like (how many
// rows, how many numbers in a row) stands in the code around it. A bump pointer, `top`, gives room and takes it back.
// Almost all the work is one call, gemm: y += x · w. It is C in WebAssembly (gemm.c), or plain JavaScript below.
// All numbers of the model come from its config.json files; constants are those that the chapters write at the call.
//
// Dims: n image tokens, m text tokens, s = m + n, H, W pixels, nh heads, hd head size, d width, c channels, gh, gw grid

const f = Math.fround; // float32, where Python has float32

// ---------------------------------------------------------------- files (chapter 8)

/** Tensors of a safetensors file, name → {shape, values: Float32Array}, from float16 or float32; no whole numbers. */
export function readSafetensors(buffer) {
  const size = Number(new DataView(buffer).getBigUint64(0, true)), tensors = new Map();
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, size)));
  for (const [name, { dtype, shape, data_offsets }] of Object.entries(header)) {
    if (dtype !== "F16" && dtype !== "F32") continue;
    const [from, to] = data_offsets.map((at) => 8 + size + at);
    if (!(from <= to && to <= buffer.byteLength)) throw new RangeError(`${name} lies beyond the end of its file.`);
    const bytes = buffer.slice(from, to);
    tensors.set(name, { shape, values: dtype === "F16" ? fromHalf(new Uint16Array(bytes)) : new Float32Array(bytes) });
  }
  return tensors;
}

/** float16 → float32: the bits move to their places, and one product mends the exponent, subnormal numbers' too. */
function fromHalf(halves) {
  const bits = new Uint32Array(halves.length), values = new Float32Array(bits.buffer);
  for (let i = 0; i < halves.length; i++) bits[i] = ((halves[i] & 0x8000) << 16) | ((halves[i] & 0x7fff) << 13);
  for (let i = 0; i < halves.length; i++) values[i] *= 2 ** 112;
  return values;
}

// ---------------------------------------------------------------- tokens (chapter 3)

export const TEMPLATE = (prompt) =>
  `<|im_start|>user\n${prompt}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n`;
const PAD = "<|endoftext|>";
const SPACE = "\\p{White_Space}"; // what \s is for the tokenizer; JavaScript's own \s differs
const PIECES = new RegExp(
  `'(?:[sSſ]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}` +
    `| ?[^${SPACE}\\p{L}\\p{N}]+[\\r\\n]*` +
    `|${SPACE}*[\\r\\n]+|${SPACE}+(?!\\P{White_Space})|${SPACE}+`,
  "gu",
);

/** Byte-level BPE from a tokenizer.json. */
export class Tokenizer {
  constructor(json) {
    this.vocab = new Map(Object.entries(json.model.vocab));
    this.ranks = new Map(json.model.merges.map((pair, rank) => [[].concat(pair).join(" "), rank]));
    this.added = new Map(json.added_tokens.map((token) => [token.content, token.id]));
    this.split = new RegExp(`(${[...this.added.keys()].map((word) => word.replace(/[|/]/g, "\\$&")).join("|")})`);
    let next = 256; // bytes as printable characters; those that have none are called by the numbers from 256 on
    this.letters = [...Array(256).keys()].map((b) =>
      String.fromCodePoint((b > 32 && b < 127) || (b > 160 && b !== 173) ? b : next++)
    );
  }

  /** Joins the pair of neighbors that was learned first, until no pair is known. */
  merge(text) {
    const parts = [...new TextEncoder().encode(text)].map((byte) => this.letters[byte]);
    for (;;) {
      let best = Infinity, at = -1;
      for (let i = 0; i + 1 < parts.length; i++) {
        const rank = this.ranks.get(`${parts[i]} ${parts[i + 1]}`) ?? Infinity;
        if (rank < best) [best, at] = [rank, i];
      }
      if (at < 0) return parts.map((part) => this.vocab.get(part));
      parts.splice(at, 2, parts[at] + parts[at + 1]);
    }
  }

  encode(text) {
    return text.split(this.split).flatMap((part) =>
      this.added.has(part)
        ? [this.added.get(part)]
        : (part.normalize("NFC").match(PIECES) ?? []).flatMap((piece) => this.merge(piece))
    );
  }

  /** The bytes of a token. */
  bytes(id) {
    this.words ??= new Map([...this.vocab, ...this.added].map(([word, id]) => [id, word]));
    const word = this.words.get(id);
    return this.added.has(word)
      ? new TextEncoder().encode(word)
      : Uint8Array.from(word, (letter) => this.letters.indexOf(letter));
  }
}

// ---------------------------------------------------------------- noise and schedule (chapter 4)

/** Standard normal float32 numbers: mx.random.normal with mx.random.key(seed). n is even; seed a number or BigInt. */
export function noise(seed, n) {
  const k0 = Number(BigInt(seed) >> 32n) | 0, k1 = Number(BigInt(seed) & 0xffffffffn) | 0;
  const keys = [k0, k1, k0 ^ k1 ^ 0x1bd11bda], turns = [[13, 15, 26, 6], [17, 29, 16, 24]];
  const half = n / 2, out = new Float32Array(n);
  for (let i = 0; i < half; i++) { // Threefry-2x32, 20 rounds
    let a = (i + keys[0]) | 0, b = (i + half + keys[1]) | 0;
    for (let r = 0; r < 5; r++) {
      for (const turn of turns[r % 2]) {
        a = (a + b) | 0;
        b = ((b << turn) | (b >>> (32 - turn))) ^ a;
      }
      a = (a + keys[(r + 1) % 3]) | 0;
      b = (b + keys[(r + 2) % 3] + r + 1) | 0;
    }
    out[i] = normal(a >>> 0);
    out[i + half] = normal(b >>> 0);
  }
  return out;
}

// The inverse error function as MLX has it: two polynomials with fused products. A product of two float32 is exact in a
// double, so that rounding once after the sum is the same.
// deno-fmt-ignore
const FAR = [3.03697567e-10, 2.93243101e-8, 1.22150334e-6, 2.84108955e-5, 3.93552968e-4, 3.02698812e-3, 4.83185798e-3,
  -2.64646143e-1, 8.40016484e-1].map(f);
// deno-fmt-ignore
const NEAR = [5.43877832e-9, 1.43285448e-7, 1.22774793e-6, 1.12963626e-7, -5.61530760e-5, -1.47697632e-4,
  2.31468678e-3, 1.15392581e-2, -2.32015476e-1, 8.86226892e-1].map(f);
function normal(bits) {
  const low = -1 + 2 ** -24, uniform = Math.min(f(f(bits) / f(2 ** 32 - 1)), 1 - 2 ** -24);
  const a = f(f(f(1 - low) * uniform) + low), t = f(Math.log(f(a * -a + 1)));
  const sum = (Math.abs(t) > 6.125 ? FAR : NEAR).reduce((sum, weight) => f(sum * t + weight));
  return f(f(Math.SQRT2) * f(a * sum));
}

/** How far to shift the schedule for n image tokens and this many steps. */
export function empiricalMu(n, steps) {
  const long = 0.00016927 * n + 0.45666666, slope = (long - (8.73809524e-5 * n + 1.89833333)) / 190;
  return n > 4300 ? long : slope * steps + long - 200 * slope;
}

/** steps + 1 noise levels, from 1 down to 0. */
export function schedule(steps, n) {
  const shift = Math.exp(empiricalMu(n, steps));
  return [...Array(steps).keys()].map((i) => shift / (shift + (1 / (1 - i / steps) - 1))).concat(0);
}

// ---------------------------------------------------------------- positions (chapter 2)

export const textIds = (m) => Array.from({ length: m }, (_, l) => [0, 0, 0, l]);
export const imageIds = (gh, gw, t = 0) =>
  Array.from({ length: gh * gw }, (_, i) => [t, Math.floor(i / gw), i % gw, 0]);

/** Cosines and sines (s, hd/2) of ids (s, 4); axis a owns axes[a]/2 angles. */
export function ropeTable(ids, axes, theta) {
  const angles = ids.flatMap((id) =>
    axes.flatMap((dim, a) => Array.from({ length: dim / 2 }, (_, i) => f(id[a]) * f(theta ** f(-2 * i / dim))))
  );
  return { cos: Float32Array.from(angles, Math.cos), sin: Float32Array.from(angles, Math.sin) };
}

// ---------------------------------------------------------------- memory, and the products in it

const FULL = new RangeError("The memory is full"), PAGE = 16384; // numbers in a page of WebAssembly's memory
const up4 = (n) => (n + 3) & ~3; // the kernel takes four numbers at a time

export class Arrays {
  /** kernel: the bytes of gemm.wasm. Without them, or where they cannot run, plain JavaScript computes. */
  constructor(kernel) {
    this.top = PAGE;
    this.kept = Infinity; // below: the kernel's stack; the end of the weights, once they are here
    this.W = new Map(); // weights: name → {at, out, inn}
    this.wasm = Boolean(kernel) && typeof WebAssembly === "object" && WebAssembly.validate(kernel);
    if (!this.wasm) {
      this.M = new Float32Array(64 * PAGE);
      return;
    }
    this.memory = new WebAssembly.Memory({ initial: 64 });
    const { exports } = new WebAssembly.Instance(new WebAssembly.Module(kernel), { env: { memory: this.memory } });
    this.M = new Float32Array(this.memory.buffer);
    this.gemm = (y, ly, x, lx, w, lw, m, k, n) => exports.gemm(4 * y, ly, 4 * x, lx, 4 * w, lw, m, k, n);
    this.silu = (x, n) => exports.silu(4 * x, n);
  }

  take(n) {
    const at = this.top;
    if (at + up4(n) > this.M.length) throw FULL;
    this.top += up4(n);
    return at;
  }
  zeros(n) {
    const at = this.take(n);
    this.M.fill(0, at, this.top);
    return at;
  }
  put(values) {
    const at = this.take(values.length);
    this.M.set(values, at);
    return at;
  }

  /** The result of work whose room is free again afterwards. When memory runs out, there is more, and a new start. */
  within(work) {
    for (const mark = this.top;; this.grow()) {
      try {
        return work();
      } catch (error) {
        if (error !== FULL) throw error;
      } finally {
        this.top = mark;
      }
    }
  }

  grow() {
    // the decoder takes at most 330 numbers a pixel
    const before = this.M, room = Math.max(before.length - this.kept, 0) / 330, side = Math.sqrt(room) & ~15;
    try {
      if (this.wasm) this.memory.grow(before.length / PAGE / 2);
    } catch {
      throw new RangeError(`Too little memory: ${side ? `${side} × ${side} would fit` : "close other pages"}.`);
    }
    this.M = this.wasm ? new Float32Array(this.memory.buffer) : new Float32Array(1.5 * before.length);
    if (!this.wasm) this.M.set(before);
  }

  /** y (m, n) += x (m, k) · w (k, n). ly, lx, lw: numbers from one row to the next; n a multiple of 4. */
  gemm(y, ly, x, lx, w, lw, m, k, n) {
    const M = this.M;
    for (let i = 0; i < m; i += 2) {
      const two = i + 1 < m, xa = x + i * lx, xb = two ? xa + lx : xa;
      for (let j = 0; j < n; j += 4) { // eight sums at a time
        let a0 = 0, a1 = 0, a2 = 0, a3 = 0, b0 = 0, b1 = 0, b2 = 0, b3 = 0;
        for (let p = 0, v = w + j; p < k; p++, v += lw) {
          const s = M[xa + p], t = M[xb + p], w0 = M[v], w1 = M[v + 1], w2 = M[v + 2], w3 = M[v + 3];
          a0 += s * w0;
          a1 += s * w1;
          a2 += s * w2;
          a3 += s * w3;
          b0 += t * w0;
          b1 += t * w1;
          b2 += t * w2;
          b3 += t * w3;
        }
        const ya = y + i * ly + j, yb = ya + ly;
        M[ya] += a0;
        M[ya + 1] += a1;
        M[ya + 2] += a2;
        M[ya + 3] += a3;
        if (two) {
          M[yb] += b0;
          M[yb + 1] += b1;
          M[yb + 2] += b2;
          M[yb + 3] += b3;
        }
      }
    }
  }

  /** x · sigmoid(x), n numbers in place. */
  silu(x, n) {
    for (let i = x; i < x + n; i++) this.M[i] /= 1 + Math.exp(-this.M[i]);
  }

  /** Weights, laid out for gemm: (out, in) → (in, out); convolutions (out, in, 3, 3) → (3, 3·in, out). */
  place(name, { shape, values }) {
    const [out, inn = 1, kh = 1, kw = 1] = shape, flat = shape.length === 1 || name.endsWith("embed_tokens.weight");
    const wide = flat ? out : up4(out), at = this.zeros(flat ? values.length : kh * kw * inn * wide), M = this.M;
    if (flat) {
      M.set(values, at);
    } else {
      for (let o = 0, from = 0; o < out; o++) {
        for (let i = 0; i < inn; i++) {
          for (let r = 0; r < kh * kw; r++) {
            M[at + (r * inn + i) * wide + o] = values[from++];
          }
        }
      }
    }
    this.W.set(name, { at, out: wide, inn });
  }

  add(x, y, n) {
    for (let i = 0; i < n; i++) this.M[x + i] += this.M[y + i];
  }

  /** Rows of `from`, `count` numbers each and `lf` apart, to rows `lt` apart. */
  copy(to, lt, from, lf, rows, count) {
    for (let i = 0; i < rows; i++) this.M.copyWithin(to + i * lt, from + i * lf, from + i * lf + count);
    return to;
  }

  /** x (m, in) → (m, out). What the adapter `this.lora`, if there is one, has for this layer comes on top: B(A x). */
  linear(x, m, name) {
    const { at, out, inn } = this.W.get(`${name}.weight`), bias = this.W.get(`${name}.bias`), y = this.zeros(m * out);
    if (bias) this.copy(y, out, bias.at, 0, m, out);
    this.gemm(y, out, x, inn, at, out, m, inn, out);
    const lora = `${this.lora}/${name}.lora`, b = this.W.get(`${lora}_B.weight`);
    if (b) this.within(() => this.gemm(y, out, this.linear(x, m, `${lora}_A`), up4(b.inn), b.at, out, m, b.inn, out));
    return y;
  }

  /** RMSNorm of n rows of d numbers, in place or to `to`. */
  rmsNorm(x, n, d, eps, name, to = x) {
    const M = this.M, w = this.W.get(`${name}.weight`).at;
    for (let i = 0; i < n * d; i += d) {
      let sum = 0;
      for (let j = 0; j < d; j++) sum += M[x + i + j] ** 2;
      const scale = 1 / Math.sqrt(sum / d + eps);
      for (let j = 0; j < d; j++) M[to + i + j] = M[x + i + j] * scale * M[w + j];
    }
    return to;
  }

  /** LayerNorm without weights of n rows of d numbers, then scale and shift: vectors (d) of mod. */
  modulate(x, n, d, mod, shift, scale) {
    const y = this.take(n * d), M = this.M;
    for (let i = 0; i < n * d; i += d) {
      let mean = 0, sum = 0;
      for (let j = 0; j < d; j++) mean += M[x + i + j] / d;
      for (let j = 0; j < d; j++) sum += (M[x + i + j] - mean) ** 2;
      const r = 1 / Math.sqrt(sum / d + 1e-6);
      for (let j = 0; j < d; j++) {
        M[y + i + j] = (1 + mod[scale * d + j]) * (M[x + i + j] - mean) * r + mod[shift * d + j];
      }
    }
    return y;
  }

  /** softmax(q kᵀ / √hd) v by heads: (s, nh·hd) → same. reach(i): how many keys query i sees. block: its name. */
  attend(q, k, v, s, nh, nkv, hd, block, reach = () => s) {
    const wide = up4(s), lq = nh * hd, lk = nkv * hd, y = this.zeros(s * lq), M = this.M;
    for (let h = 0; h < nh; h++) {
      const mark = this.top, group = Math.floor(h * nkv / nh) * hd; // heads that share keys and values
      const scores = this.zeros(s * wide), kT = this.zeros(hd * wide);
      for (let i = 0; i < s; i++) {
        for (let c = 0; c < hd; c++) {
          M[kT + c * wide + i] = M[k + i * lk + group + c] * hd ** -0.5;
        }
      }
      this.gemm(scores, wide, q + h * hd, lq, kT, wide, s, hd, wide);
      for (let i = 0, row = scores; i < s; i++, row += wide) {
        const end = row + reach(i);
        let most = -Infinity, sum = 0;
        for (let j = row; j < end; j++) most = Math.max(most, M[j]);
        for (let j = row; j < end; j++) sum += M[j] = Math.exp(M[j] - most);
        for (let j = row; j < row + wide; j++) M[j] = j < end ? M[j] / sum : 0;
      }
      this.gemm(y + h * hd, lq, scores, wide, v + group, lk, s, s, hd);
      if (this.watch) this.copy(scores, s, scores, wide, s, s);
      this.watch?.("attention", block, M.slice(scores, scores + s * s), { q: q + h * hd, lq, kT, wide });
      const silent = this.cut?.head === h && this.cut.block === block;
      for (let i = y + h * hd; silent && i < y + s * lq; i += lq) M.fill(0, i, i + hd);
      this.top = mark;
    }
    return y;
  }

  // Pictures are (H, W, c). A convolution wants them in a frame of zeros, one pixel wide: (H + 2, W + 2, c).

  /** GroupNorm and, where `act` says so, SiLU; into a frame, or not. */
  groupNorm(x, H, W, c, groups, name, { frame = 1, act = true } = {}) {
    const n = H * W, size = c / groups, row = (W + 2 * frame) * c, y = this.zeros((H + 2 * frame) * row), M = this.M;
    const sums = new Float64Array(groups), squares = new Float64Array(groups);
    const groupOf = (channel) => Math.floor(channel / size);
    for (let i = 0, at = x; i < n; i++) {
      for (let j = 0; j < c; j++, at++) {
        const q = groupOf(j);
        sums[q] += M[at];
        squares[q] += M[at] * M[at];
      }
    }
    const scale = new Float64Array(c), shift = new Float64Array(c);
    const w = this.W.get(`${name}.weight`).at, b = this.W.get(`${name}.bias`).at;
    for (let j = 0; j < c; j++) {
      const q = groupOf(j), mean = sums[q] / (n * size);
      scale[j] = M[w + j] / Math.sqrt(squares[q] / (n * size) - mean * mean + 1e-6);
      shift[j] = M[b + j] - mean * scale[j];
    }
    for (let i = 0, at = x; i < H; i++) {
      for (let k = 0, to = y + (i + frame) * row + frame * c; k < W; k++) {
        for (let j = 0; j < c; j++) M[to++] = M[at++] * scale[j] + shift[j];
      }
    }
    if (act) this.silu(y, (H + 2 * frame) * row); // the frame stays 0
    return y;
  }

  frame(x, H, W, c) {
    const y = this.zeros((H + 2) * (W + 2) * c);
    this.copy(y + (W + 3) * c, (W + 2) * c, x, W * c, H, W * c);
    return y;
  }

  /** 3 × 3 convolution of a framed picture. Three neighbors lie side by side, 3·in numbers in a row, so that a row of
   *  the output is three products, one for each row of the kernel. stride 2: zeros on the right and bottom only. */
  conv(x, H, W, name, stride = 1) {
    const { at, out, inn } = this.W.get(`${name}.weight`), bias = this.W.get(`${name}.bias`).at, row = (W + 2) * inn;
    const h = H / stride, w = W / stride, y = this.take(h * w * out), first = stride === 1 ? 0 : row + inn;
    this.copy(y, out, bias, 0, h * w, out);
    for (let i = 0; i < h; i++) {
      for (let r = 0; r < 3; r++) {
        const pixels = x + first + (i * stride + r) * row, weights = at + r * 3 * inn * out;
        this.gemm(y + i * w * out, out, pixels, stride * inn, weights, out, w, 3 * inn, out);
      }
    }
    return y;
  }
}

// ---------------------------------------------------------------- the model

const ENCODER = /^(encoder|quant_conv)\./; // its tensors

export class Klein extends Arrays {
  /** read(path): a promise of a file of the model's folder, as ArrayBuffer. kernel: the bytes of gemm.wasm, or nothing.
   *  Reads what drawing takes; `load` brings the rest when it is wanted. */
  static async open(read, kernel) {
    const klein = new Klein(kernel);
    klein.json = async (at) => JSON.parse(new TextDecoder().decode(await read(at)));
    klein.read = read;
    klein.config = {};
    klein.index = await klein.json("model_index.json");
    const last = Math.max(...klein.index.text_encoder_out_layers);
    const drawing = (name) => name !== "model.norm.weight" && Number(/layers\.(\d+)/.exec(name)?.[1] ?? 0) < last;
    await Promise.all([
      klein.json("tokenizer/tokenizer.json").then((json) => {
        klein.tokenizer = new Tokenizer(json);
      }),
      klein.load("text_encoder", drawing, "model"),
      klein.load("transformer"),
      klein.load("vae", (name) => !ENCODER.test(name)),
    ]);
    return klein;
  }

  /** Reads a part's config and those of its files that hold a tensor that is wanted. */
  async load(part, wanted = () => true, stem = "diffusion_pytorch_model") {
    this.kept = Infinity; // no size helps here
    const [config, index] = await Promise.all(["config.json", `${stem}.safetensors.index.json`]
      .map((name) => this.json(`${part}/${name}`)));
    const files = new Set(Object.entries(index.weight_map).filter(([name]) => wanted(name)).map(([, file]) => file));
    for (const bytes of await Promise.all([...files].map((file) => this.read(`${part}/${file}`)))) {
      for (const [name, tensor] of readSafetensors(bytes)) this.keep(`${part}/${name}`, tensor);
    }
    this.config[part] = config;
    this.kept = this.top;
  }

  /** A tensor of a file gets its place, unless it has one. */
  keep(name, tensor) {
    while (this.top + up4(4 * tensor.values.length) > this.M.length) this.grow();
    if (!this.W.has(name)) this.place(name, tensor);
  }

  /** What editing takes: the half of the autoencoder that reads pictures. */
  async loadEncoder() {
    if (!this.W.has("vae/quant_conv.weight")) await this.load("vae", (n) => ENCODER.test(n));
  }

  /** The model before it was distilled, which takes guidance. */
  async loadBase() {
    if (!this.config["base/transformer"]) await this.load("base/transformer");
  }

  // ---------------------------------------------------------------- text encoder (chapter 3)

  /** The ids of a prompt in the chat template; RangeError if they are more than the model reads. */
  tokenize(prompt) {
    const ids = this.tokenizer.encode(TEMPLATE(prompt)), most = this.index.max_sequence_length;
    if (ids.length <= most) return ids;
    const template = this.tokenizer.encode(TEMPLATE("")).length;
    throw new RangeError(
      `The prompt has ${ids.length} tokens and this model reads ${most} (${template} of them are ` +
        `the chat template): shorten it by about ${ids.length - most} tokens.`,
    );
  }

  /** Features (m, taps·d): what the tapped layers think about every token, side by side. */
  encodeText(ids) {
    return this.within(() => {
      const c = this.config.text_encoder, { hidden_size: d, intermediate_size: wide, rms_norm_eps: eps } = c;
      const { num_attention_heads: nh, num_key_value_heads: nkv, head_dim: hd } = c;
      const { text_encoder_out_layers: taps, max_sequence_length: m } = this.index, last = Math.max(...taps);
      const x = this.take(m * d), features = new Float32Array(m * taps.length * d), pad = this.tokenizer.added.get(PAD);
      const table = this.W.get("text_encoder/model.embed_tokens.weight").at;
      for (let i = 0; i < m; i++) this.copy(x + i * d, d, table + (ids[i] ?? pad) * d, d, 1, d);
      const rope = ropeTable(textIds(m).map((id) => id.slice(3)), [hd], c.rope_theta ?? c.rope_parameters.rope_theta);
      const scratch = this.top;
      for (let l = 0; l < last; l++, this.top = scratch) {
        const name = `text_encoder/model.layers.${l}`;
        const h = this.rmsNorm(x, m, d, eps, `${name}.input_layernorm`, this.take(m * d));
        const [q, k, v] = ["q", "k", "v"].map((p) => this.linear(h, m, `${name}.self_attn.${p}_proj`));
        for (const [y, heads, norm] of [[q, nh, "q_norm"], [k, nkv, "k_norm"]]) {
          this.turn(this.rmsNorm(y, m * heads, hd, eps, `${name}.self_attn.${norm}`), m, heads, hd, rope, 1, hd / 2);
        }
        const reach = (i) => Math.min(i + 1, ids.length); // no later token, no padding
        const y = this.attend(q, k, v, m, nh, nkv, hd, `text ${l + 1}`, reach);
        this.add(x, this.linear(y, m, `${name}.self_attn.o_proj`), m * d);
        const g = this.rmsNorm(x, m, d, eps, `${name}.post_attention_layernorm`, this.take(m * d));
        const [gate, up] = ["gate", "up"].map((p) => this.linear(g, m, `${name}.mlp.${p}_proj`)), M = this.M;
        this.silu(gate, m * wide);
        for (let i = 0; i < m * wide; i++) M[gate + i] *= M[up + i];
        this.add(x, this.linear(gate, m, `${name}.mlp.down_proj`), m * d);
        const tap = taps.indexOf(l + 1);
        for (let i = 0; tap >= 0 && i < m; i++) {
          features.set(M.subarray(x + i * d, x + (i + 1) * d), (i * taps.length + tap) * d);
        }
      }
      return features;
    });
  }

  /** RoPE in place: turns pairs of channels of x (s, nh, hd) by their angles. Pair c: c·step and c·step + apart. */
  turn(x, s, nh, hd, { cos, sin }, step = 2, apart = 1) {
    const M = this.M, half = hd / 2;
    for (let i = 0; i < s; i++) {
      for (let h = 0; h < nh; h++) {
        for (let c = 0; c < half; c++) {
          const at = x + (i * nh + h) * hd + c * step, a = M[at], b = M[at + apart];
          const co = cos[i * half + c], si = sin[i * half + c];
          M[at] = a * co - b * si;
          M[at + apart] = a * si + b * co;
        }
      }
    }
  }

  // ---------------------------------------------------------------- transformer (chapter 5)

  /** The vectors that shift, scale and gate the blocks: all that depends on the noise level alone. */
  modulation(part, t) {
    return this.within(() => {
      const waves = this.config[part].timestep_guidance_channels, half = waves / 2, x = this.take(waves), M = this.M;
      for (let i = 0; i < half; i++) {
        const angle = f(f(1000 * f(t)) * f(Math.exp(f(f(-Math.log(10000) * i) / half))));
        M[x + i] = Math.cos(angle);
        M[x + half + i] = Math.sin(angle);
      }
      const layer = (x, k) => {
        const y = this.linear(x, 1, `${part}/time_guidance_embed.timestep_embedder.linear_${k}`);
        this.silu(y, this.top - y);
        return y;
      };
      const vec = layer(layer(x, 1), 2);
      const vectors = (name) => this.M.slice(this.linear(vec, 1, `${part}/${name}.linear`), this.top);
      return {
        img: vectors("double_stream_modulation_img"),
        txt: vectors("double_stream_modulation_txt"),
        single: vectors("single_stream_modulation"),
        last: vectors("norm_out"),
      };
    });
  }

  /** x (n, d) += vector `gate` of mod · y */
  gated(x, y, n, d, mod, gate, block) {
    const M = this.M, { gates, shut } = this.cut ?? {}, cut = shut?.gate === gate && shut.block === block ? 0 : gates;
    for (let i = 0; i < n * d; i++) M[x + i] += (cut ?? mod[gate * d + i % d]) * M[y + i];
  }

  /** silu(first half) · second half: rows of 2·wide numbers, lx apart → rows of wide numbers, lt apart. */
  swiglu(x, n, lx, wide, to, lt) {
    const M = this.M;
    for (let i = 0; i < n; i++, x += lx, to += lt) {
      this.silu(x, wide);
      for (let j = 0; j < wide; j++) M[to + j] = M[x + j] * M[x + wide + j];
    }
  }

  /**
   * Velocity (n, c) of the first n image tokens: img (all, c) noisy latents and references, txt (m, …) features.
   * `this.cut`, if there is one, spoils it on purpose: a block is left out ({ block }), one of its heads is silent
   * ({ block, head }), every gate is 1 ({ gates }), one of a block is 0 ({ shut: { block, gate } }), or the network
   * believes in another noise level ({ clock }). `draw` gives it the words' features as a function leaves them
   * ({ words }).
   */
  velocity(part, img, txt, t, ids, n) {
    return this.within(() => {
      const config = this.config[part], { num_attention_heads: nh, attention_head_dim: hd, in_channels: c } = config;
      const d = nh * hd, wide = Math.floor(d * config.mlp_ratio);
      const all = img.length / c, m = txt.length / config.joint_attention_dim, s = m + all;
      const rope = ropeTable([...textIds(m), ...ids], config.axes_dims_rope, config.rope_theta);
      const cut = this.cut ?? {}, skipped = (block) => cut.block === block && !("head" in cut);
      const mod = this.modulation(part, cut.clock ?? t);
      const x = this.take(s * d),
        streams = [ // text first, all in one place
          {
            x,
            from: 0,
            count: m,
            mod: mod.txt,
            qkv: ["add_q_proj", "add_k_proj", "add_v_proj"],
            norm: "norm_added_",
            out: "to_add_out",
            mlp: "ff_context",
          },
          {
            x: x + m * d,
            from: m * d,
            count: all,
            mod: mod.img,
            qkv: ["to_q", "to_k", "to_v"],
            norm: "norm_",
            out: "to_out.0",
            mlp: "ff",
          },
        ];
      const scratch = this.top;
      this.copy(x, d, this.linear(this.put(txt), m, `${part}/context_embedder`), d, m, d);
      this.copy(x + m * d, d, this.linear(this.put(img), all, `${part}/x_embedder`), d, all, d);
      const attend = (q, k, v, block) => {
        for (const y of [q, k]) this.turn(y, s, nh, hd, rope);
        return this.attend(q, k, v, s, nh, nh, hd, block);
      };
      for (let b = 0; b < config.num_layers; b++) {
        const at = `double ${b + 1}`;
        this.top = scratch;
        if (skipped(at)) continue;
        const name = `${part}/transformer_blocks.${b}`, qkv = [0, 1, 2].map(() => this.take(s * d));
        for (const of of streams) { // each stream has its own matrices, and they meet in one attention
          const h = this.modulate(of.x, of.count, d, of.mod, 0, 1);
          of.qkv.forEach((matrix, i) => {
            const y = this.linear(h, of.count, `${name}.attn.${matrix}`);
            if (i < 2) this.rmsNorm(y, of.count * nh, hd, 1e-6, `${name}.attn.${of.norm}${"qk"[i]}`);
            this.copy(qkv[i] + of.from, d, y, d, of.count, d);
          });
        }
        const y = attend(...qkv, at);
        for (const of of streams) {
          this.gated(of.x, this.linear(y + of.from, of.count, `${name}.attn.${of.out}`), of.count, d, of.mod, 2, at);
          const up = this.linear(
            this.modulate(of.x, of.count, d, of.mod, 3, 4),
            of.count,
            `${name}.${of.mlp}.linear_in`,
          );
          this.swiglu(up, of.count, 2 * wide, wide, up, wide);
          this.gated(of.x, this.linear(up, of.count, `${name}.${of.mlp}.linear_out`), of.count, d, of.mod, 5, at);
        }
        this.watch?.("state", at, this.M.slice(x, x + s * d));
      }
      for (let b = 0; b < config.num_single_layers; b++) {
        this.top = scratch;
        if (skipped(`single ${b + 1}`)) continue;
        const name = `${part}/single_transformer_blocks.${b}.attn`, row = 3 * d + 2 * wide;
        const both = this.take(s * (d + wide));
        const fused = this.linear(this.modulate(x, s, d, mod.single, 0, 1), s, `${name}.to_qkv_mlp_proj`);
        const [q, k, v] = [0, 1, 2].map((i) => this.copy(this.take(s * d), d, fused + i * d, row, s, d));
        this.rmsNorm(q, s * nh, hd, 1e-6, `${name}.norm_q`);
        this.rmsNorm(k, s * nh, hd, 1e-6, `${name}.norm_k`);
        this.copy(both, d + wide, attend(q, k, v, `single ${b + 1}`), d, s, d);
        this.swiglu(fused + 3 * d, s, row, wide, both + d, d + wide);
        this.gated(x, this.linear(both, s, `${name}.to_out`), s, d, mod.single, 2);
        this.watch?.("state", `single ${b + 1}`, this.M.slice(x, x + s * d));
      }
      const out = this.linear(this.modulate(x + m * d, n, d, mod.last, 1, 0), n, `${part}/proj_out`);
      return this.M.slice(out, out + n * c);
    });
  }

  // ---------------------------------------------------------------- autoencoder (chapter 1)

  /** Norm, SiLU, convolution, twice, added to the input; the result takes the input's place. */
  resnet(x, H, W, c, name) {
    const groups = this.config.vae.norm_num_groups, out = this.W.get(`${name}.conv1.weight`).out, n = H * W * out;
    const h = this.conv(this.groupNorm(x, H, W, c, groups, `${name}.norm1`), H, W, `${name}.conv1`);
    const y = this.conv(this.groupNorm(h, H, W, out, groups, `${name}.norm2`), H, W, `${name}.conv2`);
    this.add(y, this.W.has(`${name}.conv_shortcut.weight`) ? this.linear(x, H * W, `${name}.conv_shortcut`) : x, n);
    return this.settle(x, y, n);
  }

  /** Moves n numbers down to where they are to stay, and frees what lies above. */
  settle(to, y, n) {
    this.M.copyWithin(to, y, y + n);
    this.top = to;
    return this.take(n);
  }

  /** The coarsest level's middle: every position looks at every other, one head. */
  middle(x, H, W, c, name) {
    x = this.resnet(x, H, W, c, `${name}.resnets.0`);
    const attn = `${name}.attentions.0`, groups = this.config.vae.norm_num_groups;
    const g = this.groupNorm(x, H, W, c, groups, `${attn}.group_norm`, { frame: 0, act: false });
    const [q, k, v] = ["to_q", "to_k", "to_v"].map((matrix) => this.linear(g, H * W, `${attn}.${matrix}`));
    this.add(x, this.linear(this.attend(q, k, v, H * W, 1, 1, c, name), H * W, `${attn}.to_out.0`), H * W * c);
    this.top = x + H * W * c;
    return this.resnet(x, H, W, c, `${name}.resnets.1`);
  }

  /** Every number of packed latents (gh·gw, 4c), and its place in (2·gh, 2·gw, c): channel c·4 + row·2 + column. */
  unpacked(gh, gw, c, visit) {
    for (let i = 0; i < gh; i++) {
      for (let j = 0; j < gw; j++) {
        for (let k = 0; k < 4 * c; k++) {
          visit((i * gw + j) * 4 * c + k, ((2 * i + ((k >> 1) & 1)) * 2 * gw + 2 * j + (k & 1)) * c + (k >> 2), k);
        }
      }
    }
  }

  /** Standard deviation and mean of latent channel k over the training pictures. */
  statistics(k) {
    const of = (name) => this.M[this.W.get(`vae/bn.running_${name}`).at + k];
    return [Math.sqrt(of("var") + this.config.vae.batch_norm_eps), of("mean")];
  }

  /** Latents (gh·gw, 4c) → {rgba (16·gh, 16·gw, 4) of 8 bits, width, height} */
  decode(latents, gh, gw) {
    return this.within(() => {
      const { latent_channels, layers_per_block, norm_num_groups: groups, ...config } = this.config.vae;
      const widths = [...(config.decoder_block_out_channels ?? config.block_out_channels)].reverse();
      let H = 2 * gh, W = 2 * gw, c = widths[0], x = this.take(H * W * latent_channels);
      this.unpacked(gh, gw, latent_channels, (from, to, k) => {
        const [std, mean] = this.statistics(k);
        this.M[x + to] = latents[from] * std + mean;
      });
      const z = this.linear(x, H * W, "vae/post_quant_conv");
      x = this.settle(x, this.conv(this.frame(z, H, W, latent_channels), H, W, "vae/decoder.conv_in"), H * W * c);
      x = this.middle(x, H, W, c, "vae/decoder.mid_block");
      for (const [level, wide] of widths.entries()) {
        const name = `vae/decoder.up_blocks.${level}`;
        for (let r = 0; r <= layers_per_block; r++, c = wide) x = this.resnet(x, H, W, c, `${name}.resnets.${r}`);
        if (level === widths.length - 1) break;
        const big = this.zeros((2 * H + 2) * (2 * W + 2) * c); // every pixel four times, in a frame
        for (let i = 0; i < 2 * H; i++) {
          for (let j = 0; j < 2 * W; j++) {
            this.copy(big + ((i + 1) * (2 * W + 2) + j + 1) * c, c, x + ((i >> 1) * W + (j >> 1)) * c, c, 1, c);
          }
        }
        H *= 2;
        W *= 2;
        x = this.settle(x, this.conv(big, H, W, `${name}.upsamplers.0.conv`), H * W * c);
      }
      x = this.conv(this.groupNorm(x, H, W, c, groups, "vae/decoder.conv_norm_out"), H, W, "vae/decoder.conv_out");
      const level = (value, i) => (i % 4 === 3 ? 255 : 255 * f(f(value / 2) + 0.5)); // a fourth channel: opaque
      // A clamped array rounds halves to even, as MLX does.
      return { rgba: Uint8ClampedArray.from(this.M.subarray(x, x + H * W * 4), level), width: W, height: H };
    });
  }

  /** An 8-bit picture (H, W, 4), sides multiples of 16 → latents (gh·gw, 4c). Wants `loadEncoder`. */
  encode(rgba, W, H) {
    return this.within(() => {
      const { latent_channels, layers_per_block, norm_num_groups: groups, block_out_channels: widths } =
        this.config.vae;
      const gh = H / 16, gw = W / 16, value = (_, i) => f(2 * f(rgba[4 * Math.floor(i / 3) + i % 3] / 255)) - 1;
      const picture = this.put(Float32Array.from({ length: H * W * 3 }, value));
      let c = widths[0], x = this.conv(this.frame(picture, H, W, 3), H, W, "vae/encoder.conv_in");
      for (const [level, wide] of widths.entries()) {
        const name = `vae/encoder.down_blocks.${level}`;
        for (let r = 0; r < layers_per_block; r++, c = wide) x = this.resnet(x, H, W, c, `${name}.resnets.${r}`);
        if (level === widths.length - 1) break;
        x = this.settle(x, this.conv(this.frame(x, H, W, c), H, W, `${name}.downsamplers.0.conv`, 2), H * W * c / 4);
        H /= 2;
        W /= 2;
      }
      x = this.middle(x, H, W, c, "vae/encoder.mid_block");
      x = this.conv(this.groupNorm(x, H, W, c, groups, "vae/encoder.conv_norm_out"), H, W, "vae/encoder.conv_out");
      const moments = this.linear(x, H * W, "vae/quant_conv"),
        latents = new Float32Array(gh * gw * 4 * latent_channels);
      this.copy(moments, latent_channels, moments, 2 * latent_channels, H * W, latent_channels); // means only
      this.unpacked(gh, gw, latent_channels, (to, from, k) => {
        const [std, mean] = this.statistics(k);
        latents[to] = (this.M[moments + from] - mean) / std;
      });
      return latents;
    });
  }

  // ---------------------------------------------------------------- pipeline (chapter 6)

  /** Draws, one Euler step at a time; `decode(clean)` is the picture expected from there, at the end the picture.
   *  reference: {rgba, width, height}, a picture to edit. mask: a number per token, 1 where it is drawn anew, 0 where
   *  it stays. model: "nano-base", with guidance, or any other. lora: the name of an adapter. start: noise. */
  *draw({ prompt, seed, steps, width, height, model, lora, guidance = 1, reference, mask, start }) {
    const part = model === "nano-base" ? "base/transformer" : "transformer", c = this.config[part].in_channels;
    const gh = height / 16, gw = width / 16, n = gh * gw, sigmas = schedule(steps, n), ids = imageIds(gh, gw);
    const txt = this.encodeText(this.tokenize(prompt)), without = guidance > 1 && this.encodeText(this.tokenize(""));
    const seen = reference ? this.encode(reference.rgba, reference.width, reference.height) : [];
    if (reference) ids.push(...imageIds(reference.height / 16, reference.width / 16, 10));
    const eps = start ?? noise(seed, n * c), wide = txt.length / this.index.max_sequence_length;
    this.cut?.words?.(txt, wide);
    for (let index = 0, x = eps; index < steps; index++) {
      const t = sigmas[index], tNext = sigmas[index + 1], img = new Float32Array(n * c + seen.length);
      img.set(x);
      img.set(seen, n * c);
      this.lora = lora; // in each step: another walk may have gone on in between
      let velocity = this.velocity(part, img, txt, t, ids, n);
      if (without) {
        const other = this.velocity(part, img, without, t, ids, n);
        velocity = velocity.map((guided, i) => other[i] + f(guidance * f(guided - other[i])));
      }
      if (mask) {
        velocity = velocity.map((anew, i) => { // elsewhere the walk leads back to the picture
          const back = f(f(f(f(1 - tNext) * seen[i]) + f(f(tNext) * eps[i])) - x[i]) / f(tNext - t);
          return back + mask[Math.floor(i / c)] * (anew - back);
        });
      }
      x = x.map((value, i) => value + f(f(tNext - t) * velocity[i]));
      const clean = x.map((value, i) => value - f(f(tNext) * velocity[i]));
      yield { index, steps, t, tNext, gh, gw, velocity, latents: x, clean };
    }
  }
}
