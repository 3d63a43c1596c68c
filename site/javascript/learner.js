// The worker in which a network learns to draw. It tells every second how far it is.
import { Flow, Lessons, mix, PICTURE, sheet, vary } from "./flow.js";
import { normals, uniforms } from "./plane.js";

const TIMES = [1, 0.8, 0.6, 0.4, 0.2], // at which it is asked for its guess
  VARIANTS = 64, // of each drawing
  STEPS = 10, // of the walk, of which every second is shown
  PAPER = [243, 242, 238];
let lessons,
  running = false;

/** The compiled product, or null: then plain JavaScript computes, some ten times slower. */
const kernel = fetch(new URL("gemm.wasm", import.meta.url)).then((answer) => answer.ok ? answer.arrayBuffer() : null)
  .catch(() => null);

const repeated = (labels, times) => labels.flatMap((label) => times.map(() => label));

/** Noisy versions of the drawings, and what the network takes each for. */
function asked() {
  const { flow, drawn } = lessons, count = drawn.length / PICTURE, labels = [...Array(count).keys()];
  const all = new Float32Array(TIMES.length * drawn.length);
  for (let i = 0; i < count * TIMES.length; i++) {
    const from = Math.floor(i / TIMES.length) * PICTURE;
    all.set(drawn.subarray(from, from + PICTURE), i * PICTURE);
  }
  const times = labels.flatMap(() => TIMES), given = mix(all, normals(all.length, uniforms(3)), times);
  const guessed = flow.guess(given, repeated(labels, TIMES), times);
  return { given: sheet(given, count, TIMES.length), guessed: sheet(guessed, count, TIMES.length) };
}

/** The walk of each label from noise that follows from a seed: noise, and what is there after every second step. */
function walked(seed) {
  const { flow, drawn } = lessons, count = drawn.length / PICTURE, noise = normals(drawn.length, uniforms(seed));
  const kept = [...flow.walk(noise, [...Array(count).keys()], STEPS)].filter((_, i) => i % 2 === 0);
  const all = new Float32Array(kept.length * drawn.length);
  kept.forEach((patches, k) => {
    for (let i = 0; i < count; i++) {
      all.set(patches.subarray(i * PICTURE, (i + 1) * PICTURE), (i * kept.length + k) * PICTURE);
    }
  });
  return sheet(all, count, kept.length);
}

function begin(flow, drawings) {
  const next = uniforms(5), each = drawings.map((drawing) => vary(drawing, VARIANTS, next, PAPER));
  const patches = new Float32Array(each.length * VARIANTS * PICTURE);
  each.forEach((some, i) => patches.set(some, i * some.length));
  const labels = [...Array(each.length * VARIANTS).keys()].map((i) => Math.floor(i / VARIANTS));
  lessons = new Lessons(flow, { patches, labels });
  lessons.drawn = Float32Array.from(each.flatMap((some) => [...some.subarray(0, PICTURE)]));
}

async function learn() {
  const { flow, steps } = lessons;
  running = true;
  let recent = [], shown = 0;
  while (running && flow.done < steps) {
    recent.push(lessons.step());
    const last = flow.done === steps;
    if (!last && performance.now() - shown < 1000) {
      await new Promise((resolve) => setTimeout(resolve)); // a wish to stop may have come
      continue;
    }
    const loss = recent.reduce((a, b) => a + b) / recent.length;
    self.postMessage({ kind: "learned", done: flow.done, steps, loss, ...asked() });
    [recent, shown] = [[], performance.now()];
  }
  running = false;
  self.postMessage({ kind: "stopped", done: flow.done, steps, ...asked(), walk: walked(1) });
}

self.onmessage = async ({ data: { kind, drawings, seed } }) => {
  if (kind === "stop") running = false;
  else if (kind === "walk") self.postMessage({ kind: "walked", walk: walked(seed) });
  else {
    if (drawings) begin(new Flow(await kernel), drawings);
    learn();
  }
};
