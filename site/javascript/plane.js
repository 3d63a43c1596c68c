// Flow matching in the plane: the network of three layers that ends chapter 0, and how it learns, without a library.
//
// Points lie one after the other, x y x y …, in a Float32Array. A matrix (out, in) lies row by row, as MLX has it.

/** A source of numbers from 0 to 1 that follow from a seed: mulberry32. */
export function uniforms(seed) {
  let state = seed | 0;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let bits = Math.imul(state ^ (state >>> 15), 1 | state);
    bits = (bits + Math.imul(bits ^ (bits >>> 7), 61 | bits)) ^ bits;
    return ((bits ^ (bits >>> 14)) >>> 0) / 2 ** 32;
  };
}

/** n standard normal numbers, two from each pair of uniform ones (Box and Muller 1958). n is even. */
export function normals(n, next) {
  const out = new Float32Array(n);
  for (let i = 0; i < n; i += 2) {
    const far = Math.sqrt(-2 * Math.log(1 - next())),
      angle = 2 * Math.PI * next();
    out[i] = far * Math.cos(angle);
    out[i + 1] = far * Math.sin(angle);
  }
  return out;
}

/** a (m, k) times the transpose of b (n, k): (m, n). Two rows by two columns at a time, so that each number serves twice. */
export function product(a, b, m, n, k) {
  const y = new Float32Array(m * n);
  for (let i = 0; i < m; i += 2) {
    const a0 = i * k,
      a1 = i + 1 < m ? a0 + k : a0;
    for (let j = 0; j < n; j += 2) {
      const b0 = j * k,
        b1 = j + 1 < n ? b0 + k : b0;
      let s = 0,
        t = 0,
        u = 0,
        v = 0;
      for (let p = 0; p < k; p++) {
        const x0 = a[a0 + p],
          x1 = a[a1 + p],
          w0 = b[b0 + p],
          w1 = b[b1 + p];
        s += x0 * w0;
        t += x0 * w1;
        u += x1 * w0;
        v += x1 * w1;
      }
      y[i * n + j] = s;
      if (b1 > b0) y[i * n + j + 1] = t;
      if (a1 > a0) y[(i + 1) * n + j] = u;
      if (a1 > a0 && b1 > b0) y[(i + 1) * n + j + 1] = v;
    }
  }
  return y;
}

/** (rows, columns) → (columns, rows) */
function transposed(a, rows, columns) {
  const out = new Float32Array(a.length);
  for (let i = 0; i < rows; i++) for (let j = 0; j < columns; j++) out[j * rows + i] = a[i * columns + j];
  return out;
}

/** Points on their lines: (1 - t)·x0 + t·eps, with a time for each. */
export function noised(x0, eps, t) {
  return x0.map((value, i) => (1 - t[i >> 1]) * value + t[i >> 1] * eps[i]);
}

/** The velocity of points, as a network of three layers guesses it: (x, y, t) → 96 numbers → 96 → 2, SiLU between. */
export class Field {
  constructor(seed = 0, sizes = [3, 96, 96, 2]) {
    const next = uniforms(seed);
    this.layers = sizes.slice(1).map((out, l) => {
      const inn = sizes[l],
        draw = (count) => Float32Array.from({ length: count }, () => (2 * next() - 1) / Math.sqrt(inn));
      return { inn, out, weight: draw(out * inn), bias: draw(out) };
    });
  }

  /** What goes into each layer, and last the velocities. points (n, 2), t (n). */
  run(points, t) {
    const n = t.length,
      seen = [
        Float32Array.from(
          { length: 3 * n },
          (_, i) => (i % 3 < 2 ? points[2 * ((i / 3) | 0) + (i % 3)] : t[(i / 3) | 0]),
        ),
      ];
    const before = []; // of the SiLU
    this.layers.forEach(({ inn, out, weight, bias }, l) => {
      const y = product(seen[l], weight, n, out, inn);
      for (let i = 0; i < y.length; i++) y[i] += bias[i % out];
      before.push(y);
      seen.push(l + 1 < this.layers.length ? y.map((z) => z / (1 + Math.exp(-z))) : y);
    });
    return { seen, before };
  }

  velocity(points, t) {
    return this.run(points, t).seen.at(-1);
  }

  /** The mean squared error of the guess of eps - x0, and its gradient: for each layer that of weight and of bias. */
  lossAndGradient(x0, eps, t) {
    const n = t.length,
      { seen, before } = this.run(noised(x0, eps, t), t),
      apart = seen.at(-1).map((guess, i) => guess - (eps[i] - x0[i])),
      loss = apart.reduce((sum, d) => sum + d * d, 0) / (2 * n),
      gradient = [];
    let back = apart.map((d) => d / n); // how the loss changes with what a layer gives
    for (let l = this.layers.length - 1; l >= 0; l--) {
      const { inn, out, weight } = this.layers[l],
        turned = transposed(back, n, out),
        bias = Float32Array.from(
          { length: out },
          (_, o) => turned.subarray(o * n, (o + 1) * n).reduce((a, b) => a + b, 0),
        );
      gradient[l] = { weight: product(turned, transposed(seen[l], n, inn), out, inn, n), bias };
      if (l === 0) break;
      back = product(back, transposed(weight, out, inn), n, inn, out);
      const z = before[l - 1];
      for (let i = 0; i < back.length; i++) {
        const open = 1 / (1 + Math.exp(-z[i]));
        back[i] *= open * (1 + z[i] * (1 - open)); // the slope of SiLU
      }
    }
    return { loss, gradient };
  }
}

/** Learns from examples (N, 2): Adam (Kingma and Ba 2015), whose rate falls as half a cosine, as in chapter 0. */
export class Training {
  constructor(field, { steps = 2000, batch = 128, rate = 2e-2, seed = 2 } = {}) {
    Object.assign(this, { field, steps, batch, rate, done: 0, next: uniforms(seed) });
    this.averages = field.layers.map(({ weight, bias }) =>
      Object.fromEntries(
        Object.entries({ weight, bias }).map(([name, its]) => [name, [its.map(() => 0), its.map(() => 0)]]),
      )
    );
  }

  /** One step; returns its loss. */
  step(examples) {
    const { batch, next } = this,
      rows = Array.from({ length: batch }, () => Math.floor((next() * examples.length) / 2)),
      x0 = Float32Array.from({ length: 2 * batch }, (_, i) => examples[2 * rows[i >> 1] + (i & 1)]),
      eps = normals(2 * batch, next),
      { loss, gradient } = this.field.lossAndGradient(x0, eps, Float32Array.from({ length: batch }, next));
    this.update(gradient);
    return loss;
  }

  update(gradient) {
    const rate = (this.rate * (1 + Math.cos((Math.PI * this.done++) / this.steps))) / 2;
    this.field.layers.forEach((layer, l) => {
      for (const name of ["weight", "bias"]) {
        const [mean, square] = this.averages[l][name],
          values = layer[name],
          slope = gradient[l][name];
        for (let i = 0; i < values.length; i++) {
          mean[i] = 0.9 * mean[i] + 0.1 * slope[i];
          square[i] = 0.999 * square[i] + 0.001 * slope[i] ** 2;
          values[i] -= (rate * mean[i]) / (Math.sqrt(square[i]) + 1e-8);
        }
      }
    });
  }
}

/** The walk from noise (n, 2) in equal steps, from time 1 to 0: where the points are after each, the noise first. */
export function walk(field, noise, steps) {
  const path = [noise];
  for (let i = 0; i < steps; i++) {
    const x = path.at(-1),
      velocity = field.velocity(x, new Float32Array(x.length / 2).fill(1 - i / steps));
    path.push(x.map((value, k) => value - velocity[k] / steps));
  }
  return path;
}

/** All straight lines from an example to noise that pass through (x, y) at time t: how likely each is, and the example
 *  that is to be expected, their mean. The noise of a line is (x - (1 - t)·x0) / t, and normal. */
export function lines(examples, x, y, t) {
  const far = Array.from({ length: examples.length / 2 }, (_, i) => {
    const a = (x - (1 - t) * examples[2 * i]) / t,
      b = (y - (1 - t) * examples[2 * i + 1]) / t;
    return -(a * a + b * b) / 2;
  });
  const most = far.reduce((a, b) => Math.max(a, b), -Infinity),
    likely = far.map((value) => Math.exp(value - most)),
    sum = likely.reduce((a, b) => a + b, 0),
    shares = likely.map((value) => value / sum);
  const mean = (k) => shares.reduce((total, share, i) => total + share * examples[2 * i + k], 0);
  return { shares, expected: [mean(0), mean(1)] };
}
