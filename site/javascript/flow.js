// microflow.py in JavaScript: chapter 0's network, which learns to draw pictures of 24 × 24 pixels, and its derivatives.
//
// Pictures lie as patches (36, 48), squares of 4 × 4 pixels row by row, in numbers from -1 to 1. As in klein.js an
// array is the place where it begins in the memory M. What the network computes from other arrays is a pair of places:
// x for the numbers and g for their gradient. Each operation puts its own way back on the tape.
import { Arrays } from "./klein.js";
import { normals, uniforms } from "./plane.js";

const N = 36, // patches of a picture
  C = 48, // numbers of a patch
  S = N + 1, // tokens: the label, then the patches
  WIDE = 40, // rows of scores: S, rounded up to a multiple of four
  WIDTH = 96,
  HEADS = 3,
  BLOCKS = 3,
  HD = WIDTH / HEADS;
export const LABELS = 16, // at most
  SIDE = 24, // pixels
  PICTURE = N * C;

/** A network with new weights, as microflow draws them; kernel: the bytes of gemm.wasm, or null. */
export class Flow extends Arrays {
  constructor(kernel, seed = 0) {
    super(kernel);
    const sizes = { words: [LABELS, WIDTH], time: [32, WIDTH], into: [C, WIDTH], places: [N, WIDTH], out: [WIDTH, C] },
      gains = { places: 0, out: 0, mix: 0.3, down: 0.3 }, // what adds to the tokens begins small
      next = uniforms(seed);
    for (let i = 0; i < BLOCKS; i++) {
      for (const name of ["query", "key", "value", "mix"]) sizes[name + i] = [WIDTH, WIDTH];
      sizes[`up${i}`] = [WIDTH, 4 * WIDTH];
      sizes[`down${i}`] = [4 * WIDTH, WIDTH];
    }
    this.weights = {};
    while (this.M.length < 2 ** 24) this.grow(); // 64 MB: the weights, and a batch on its way
    for (const [name, [inn, out]] of Object.entries(sizes)) {
      const scale = (gains[name.replace(/\d/, "")] ?? 1) / Math.sqrt(inn);
      this.weights[name] = { ...this.pair(inn * out), inn, out, n: inn * out, adam: this.zeros(2 * inn * out) };
      this.M.set(normals(inn * out, next).map((value) => value * scale), this.weights[name].x);
    }
    this.tape = [];
    this.done = 0;
  }

  pair(n) {
    return { x: this.zeros(n), g: this.zeros(n) };
  }

  /** Rows of numbers from `from`, as columns at a new place whose rows are `wide` apart. */
  turned(from, rows, columns, step = columns, wide = rows) {
    const at = this.take(columns * wide), { M } = this;
    for (let i = 0; i < rows; i++) {
      for (let j = 0; j < columns; j++) M[at + j * wide + i] = M[from + i * step + j];
    }
    return at;
  }

  // ---------------------------------------------------------------- operations, each with its way back

  /** a (rows, in) → (rows, out), added to `to`, whose gradient is there when the way back comes to it. */
  matrix(a, rows, name, to = this.pair(rows * this.weights[name].out)) {
    const w = this.weights[name], { inn, out } = w;
    this.gemm(to.x, out, a.x, inn, w.x, out, rows, inn, out);
    this.tape.push(() => {
      this.gemm(a.g, inn, to.g, out, this.turned(w.x, inn, out), inn, rows, out, inn);
      this.gemm(w.g, out, this.turned(a.x, rows, inn), rows, to.g, out, inn, rows, out);
    });
    return to;
  }

  /** Mean 0 and variance 1 in each row. */
  norm(a, rows) {
    const y = this.pair(rows * WIDTH), scales = this.take(rows), { M } = this;
    for (let i = 0; i < rows; i++) {
      const from = a.x + i * WIDTH;
      let mean = 0, square = 0;
      for (let j = 0; j < WIDTH; j++) mean += M[from + j] / WIDTH;
      for (let j = 0; j < WIDTH; j++) square += (M[from + j] - mean) ** 2 / WIDTH;
      const scale = M[scales + i] = 1 / Math.sqrt(square + 1e-5);
      for (let j = 0; j < WIDTH; j++) M[y.x + i * WIDTH + j] = (M[from + j] - mean) * scale;
    }
    this.tape.push(() => {
      for (let i = 0; i < rows; i++) {
        const x = y.x + i * WIDTH, g = y.g + i * WIDTH;
        let mean = 0, along = 0;
        for (let j = 0; j < WIDTH; j++) {
          mean += M[g + j] / WIDTH;
          along += M[g + j] * M[x + j] / WIDTH;
        }
        for (let j = 0; j < WIDTH; j++) {
          M[a.g + i * WIDTH + j] += M[scales + i] * (M[g + j] - mean - M[x + j] * along);
        }
      }
    });
    return y;
  }

  /** x · sigmoid(x) of n numbers. */
  swish(a, n) {
    const y = this.pair(n), { M } = this;
    M.copyWithin(y.x, a.x, a.x + n);
    this.silu(y.x, n);
    this.tape.push(() => {
      for (let i = 0; i < n; i++) {
        const x = M[a.x + i], sigmoid = x ? M[y.x + i] / x : 0.5;
        M[a.g + i] += M[y.g + i] * (sigmoid + M[y.x + i] * (1 - sigmoid));
      }
    });
    return y;
  }

  /** softmax(q kᵀ / √hd) v, for b pictures and each head by itself. */
  attention(q, k, v, b) {
    const y = this.pair(b * S * WIDTH), scale = HD ** -0.5, { M } = this;
    for (let pic = 0; pic < b; pic++) {
      for (let at = pic * S * WIDTH, end = at + WIDTH; at < end; at += HD) {
        const p = this.zeros(S * WIDE), mark = this.top;
        this.gemm(p, WIDE, q.x + at, WIDTH, this.turned(k.x + at, S, HD, WIDTH, WIDE), WIDE, S, HD, WIDE);
        for (let i = 0; i < S; i++) this.softmax(p + i * WIDE, scale);
        this.gemm(y.x + at, WIDTH, p, WIDE, v.x + at, WIDTH, S, S, HD);
        this.top = mark;
        this.tape.push(() => {
          this.gemm(v.g + at, WIDTH, this.turned(p, S, S, WIDE), S, y.g + at, WIDTH, S, S, HD);
          const s = this.zeros(S * WIDE);
          this.gemm(s, WIDE, y.g + at, WIDTH, this.turned(v.x + at, S, HD, WIDTH, WIDE), WIDE, S, HD, WIDE);
          for (let i = 0; i < S * WIDE; i += WIDE) {
            let along = 0;
            for (let j = 0; j < S; j++) along += M[p + i + j] * M[s + i + j];
            for (let j = 0; j < S; j++) M[s + i + j] = scale * M[p + i + j] * (M[s + i + j] - along);
          }
          this.gemm(q.g + at, WIDTH, s, WIDE, k.x + at, WIDTH, S, S, HD);
          this.gemm(k.g + at, WIDTH, this.turned(s, S, S, WIDE), S, q.x + at, WIDTH, S, S, HD);
        });
      }
    }
    return y;
  }

  softmax(row, scale) {
    const { M } = this;
    let most = -Infinity, sum = 0;
    for (let j = 0; j < S; j++) most = Math.max(most, M[row + j]);
    for (let j = 0; j < S; j++) sum += M[row + j] = Math.exp(scale * (M[row + j] - most));
    for (let j = 0; j < WIDE; j++) M[row + j] = j < S ? M[row + j] / sum : 0;
  }

  // ---------------------------------------------------------------- the network

  /** The label and the patches of each picture as tokens (b·37, 96): words, patches, places and times added up. */
  tokens(patches, labels, times) {
    const b = labels.length, x = this.pair(b * S * WIDTH), { M, weights: { words, places } } = this;
    const input = { x: this.put(patches), g: this.zeros(patches.length) },
      into = this.matrix(input, b * N, "into"),
      waves = Array.from(times, (t) =>
        Array.from({ length: 32 }, (_, i) => {
          const angle = t * Math.exp(Math.log(100) * (i % 16) / 15);
          return i < 16 ? Math.cos(angle) : Math.sin(angle);
        })),
      when = this.matrix({ x: this.put(waves.flat()), g: this.zeros(32 * b) }, b, "time");
    const each = (work) => {
      for (let pic = 0; pic < b; pic++) {
        for (let i = 0; i < S; i++) {
          const row = (pic * S + i) * WIDTH;
          const parts = i ? [[into, pic * N + i - 1], [places, i - 1], [when, pic]] : [[words, labels[pic]]];
          for (const [part, number] of parts) work(row, part, number * WIDTH);
        }
      }
    };
    each((row, part, at) => {
      for (let j = 0; j < WIDTH; j++) M[x.x + row + j] += M[part.x + at + j];
    });
    this.tape.push(() =>
      each((row, part, at) => {
        for (let j = 0; j < WIDTH; j++) M[part.g + at + j] += M[x.g + row + j];
      })
    );
    return x;
  }

  /** patches (b·36·48), labels (b), times (b) → a guess of the picture in each: a pair (b·37, 48), first the label's row.
   *
   *  What a block adds to the tokens is added in place: the gradient of a sum is that of both its parts. */
  run(patches, labels, times) {
    const b = labels.length, rows = b * S, x = this.tokens(patches, labels, times);
    for (let i = 0; i < BLOCKS; i++) {
      const y = this.norm(x, rows),
        [q, k, v] = ["query", "key", "value"].map((name) => this.matrix(y, rows, name + i));
      this.matrix(this.attention(q, k, v, b), rows, `mix${i}`, x);
      this.matrix(this.swish(this.matrix(this.norm(x, rows), rows, `up${i}`), rows * 4 * WIDTH), rows, `down${i}`, x);
    }
    return this.matrix(this.norm(x, rows), rows, "out");
  }

  /** The guesses (b·36·48), to look at. */
  guess(patches, labels, times) {
    return this.within(() => {
      this.tape = [];
      const { x } = this.run(patches, labels, times), b = labels.length, all = new Float32Array(b * PICTURE);
      for (let pic = 0; pic < b; pic++) {
        const from = x + (pic * S + 1) * C;
        all.set(this.M.subarray(from, from + PICTURE), pic * PICTURE);
      }
      return all;
    });
  }

  /** The mean squared error of the guesses; afterwards each weight has its gradient. */
  loss(clean, labels, noise, times) {
    const mixed = mix(clean, noise, times);
    return this.within(() => {
      this.tape = [];
      for (const { g, n } of Object.values(this.weights)) this.M.fill(0, g, g + n);
      const y = this.run(mixed, labels, times), { M } = this;
      let loss = 0;
      for (let i = 0; i < clean.length; i++) {
        const at = i + (Math.floor(i / PICTURE) + 1) * C, miss = M[y.x + at] - clean[i];
        loss += miss ** 2 / clean.length;
        M[y.g + at] = 2 * miss / clean.length;
      }
      while (this.tape.length) {
        const mark = this.top;
        this.tape.pop()();
        this.top = mark;
      }
      return loss;
    });
  }

  /** A step of Adam (Kingma and Ba 2015). */
  update(rate) {
    const step = ++this.done, { M } = this;
    for (const { x, g, n, adam } of Object.values(this.weights)) {
      for (let i = 0; i < n; i++) {
        const first = M[adam + i] += 0.1 * (M[g + i] - M[adam + i]),
          second = M[adam + n + i] += 0.001 * (M[g + i] ** 2 - M[adam + n + i]);
        M[x + i] -= rate * first / (1 - 0.9 ** step) / (Math.sqrt(second / (1 - 0.999 ** step)) + 1e-8);
      }
    }
  }

  /** From noise (b·36·48) to the guess, a part of the way at a time: what is there after each step, the noise first. */
  *walk(noise, labels, steps = 10) {
    let x = noise;
    yield x;
    for (let i = steps; i; i--) {
      const guess = this.guess(x, labels, labels.map(() => i / steps));
      yield x = x.map((value, j) => value + (guess[j] - value) / i);
    }
  }
}

/** Of each picture its share 1 - t, and t of the noise. */
export const mix = (clean, noise, times) =>
  clean.map((value, i) => {
    const t = times[Math.floor(i / PICTURE)];
    return (1 - t) * value + t * noise[i];
  });

/** Learns from examples {patches: (count·36·48), labels: (count)}. */
export class Lessons {
  constructor(flow, examples, { steps = 500, batch = 16, rate = 2e-3, seed = 1 } = {}) {
    Object.assign(this, { flow, examples, steps, batch, rate, next: uniforms(seed) });
  }

  step() {
    const { flow, examples: { patches, labels }, steps, batch, next } = this,
      clean = new Float32Array(batch * PICTURE),
      rows = Array.from({ length: batch }, () => Math.floor(next() * labels.length));
    rows.forEach((row, i) => clean.set(patches.subarray(row * PICTURE, (row + 1) * PICTURE), i * PICTURE));
    const times = Array.from({ length: batch }, next),
      loss = flow.loss(clean, rows.map((row) => labels[row]), normals(clean.length, next), times),
      warm = Math.min(1, (flow.done + 1) / 50);
    flow.update(this.rate * warm * (1 + Math.cos(Math.PI * (flow.done + 1) / steps)) / 2);
    return loss;
  }
}

// ---------------------------------------------------------------- pictures

/** Where the numbers of pixel (row, column) of a picture begin. */
const place = (row, column) => ((row >> 2) * 6 + (column >> 2)) * C + ((row & 3) * 4 + (column & 3)) * 3;

/** A drawing of 96 × 96 pixels, `count` times: a little larger or smaller, and moved a little, so that no pixel can be
 *  learned by heart. Patches (count·36·48). What lies beyond its edge is paper. */
export function vary({ rgba, width }, count, next, paper) {
  const all = new Float32Array(count * PICTURE), fine = width / SIDE;
  for (let k = 0; k < count; k++) {
    const zoom = 0.94 + 0.12 * next(), across = 0.05 * (next() - 0.5), down = 0.05 * (next() - 0.5);
    const from = (at, moved) => Math.floor(((at + 0.5) / width - 0.5 - moved) / zoom * width + width / 2);
    for (let i = 0; i < width; i++) {
      for (let j = 0; j < width; j++) {
        const x = from(j, across), y = from(i, down), inside = Math.min(x, y) >= 0 && Math.max(x, y) < width;
        const at = k * PICTURE + place(Math.floor(i / fine), Math.floor(j / fine));
        for (let c = 0; c < 3; c++) {
          const level = inside ? rgba[4 * (y * width + x) + c] : paper[c];
          all[at + c] += (level / 127.5 - 1) / fine ** 2;
        }
      }
    }
  }
  return all;
}

/** Pictures as patches (rows·columns·36·48), side by side as 8-bit pixels for a canvas. */
export function sheet(patches, rows, columns) {
  const width = columns * SIDE, height = rows * SIDE, rgba = new Uint8ClampedArray(4 * width * height).fill(255);
  for (let i = 0; i < height; i++) {
    for (let j = 0; j < width; j++) {
      const picture = Math.floor(i / SIDE) * columns + Math.floor(j / SIDE);
      const at = picture * PICTURE + place(i % SIDE, j % SIDE);
      for (let c = 0; c < 3; c++) rgba[4 * (i * width + j) + c] = (patches[at + c] + 1) * 127.5;
    }
  }
  return { rgba, width, height };
}
