// Everything slow happens here, so that the page stays awake. A newer wish, or a stop, ends the one before.
import { preview } from "./fast_preview.js";
import { loadAdapter } from "./adapter.js";
import { Klein, noise, TEMPLATE } from "./klein.js";
import { foldBlanks } from "./limits.js";
import { paste, tokenMask } from "./masks.js";
import { spoil } from "./mistakes.js";
import { unpack } from "./packed.js";
import { BYTES, FILES, FOLDER, MODEL } from "./world.js";

const folder = new URL(FOLDER, import.meta.url),
  told = new URL(self.location).searchParams,
  plain = told.get("wasm") === "0",
  PATIENCE = Number(told.get("patience") ?? 15); // seconds without a byte, until the page says so
const PREVIEWS = 8; // at most, of a long run
const MATRIX = 4 * 129 * 48; // bytes of the fast preview's
let latest = 0,
  loaded = 0,
  total = 0,
  halt = new AbortController(), // of all that is being loaded
  waiting; // for a byte: a timer

/** The browser's own store of what it fetched, without the models of earlier days; undefined where there is none. */
const store = (async () => {
  const cache = await self.caches.open(`klein-${MODEL}`);
  for (const request of await cache.keys()) if (!request.url.startsWith(folder)) await cache.delete(request);
  return cache;
})().catch(() => undefined);

const failed = (path, why) =>
  new Error(
    halt.signal.aborted
      ? "Loading was stopped. The next picture begins it again."
      : `The model could not be loaded (${path}: ${why}). Try again in a moment.`,
  );

/** From here on, time without a byte is told. */
function wait() {
  clearInterval(waiting);
  waiting = setInterval(() => {
    if (loaded < total) self.postMessage({ id: latest, kind: "slow" });
  }, 1000 * PATIENCE);
}

/** The bytes of an answer, while the page is told how many have come. */
async function receive(answer) {
  const chunks = [];
  for (const reader = answer.body.getReader();;) {
    const { done, value } = await reader.read();
    if (done) return new Blob(chunks).arrayBuffer();
    chunks.push(value);
    loaded += value.length;
    wait();
    self.postMessage({ id: latest, kind: "loading", loaded: Math.min(loaded, total), total });
  }
}

/** What is wrong with these bytes, or "": the build of the site knew the length and the SHA-256 of each file. */
async function check(path, bytes) {
  const [length, sum] = FILES[path];
  if (bytes.byteLength !== length) return `${bytes.byteLength} bytes instead of ${length}`;
  if (!self.crypto?.subtle) return ""; // browsers offer it to https and to this machine's own pages only
  const hash = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
  return [...hash].map((byte) => byte.toString(16).padStart(2, "0")).join("") === sum ? "" : "damaged on its way";
}

/** A file of the model: from the browser's store if it is right there, else from the site; only what is right is kept. */
async function fetchFile(path) {
  const url = new URL(path, folder),
    kept = await store,
    found = await kept?.match(url);
  if (found) {
    const bytes = await receive(found).catch(() => new ArrayBuffer(0));
    if (!(await check(path, bytes))) return bytes;
    loaded -= bytes.byteLength;
    await kept.delete(url);
  }
  const answer = await fetch(url, { signal: halt.signal }).catch(() => ({ ok: false, status: "no connection" }));
  if (!answer.ok) throw failed(path, answer.status);
  const bytes = await receive(answer).catch(() => {
    throw failed(path, "the connection broke off");
  });
  const wrong = await check(path, bytes);
  if (wrong) throw failed(path, wrong);
  await kept?.put(url, new Response(bytes)).catch(() => 0); // no room: it is fetched again next time
  return bytes;
}

/** A file as klein.js reads it: weights travel packed. */
const fetched = async (path) => path.endsWith(".safetensors") ? unpack(await fetchFile(`${path}.gz`)) : fetchFile(path);

/** The compiled product; null where it cannot be had: then plain JavaScript does its work. */
async function fetchKernel() {
  if (plain) return null;
  const answer = await fetch(new URL("gemm.wasm", import.meta.url), { signal: halt.signal }).catch(() => null);
  return answer?.ok ? answer.arrayBuffer().catch(() => null) : null; // klein.js looks whether it is a program
}

/** The matrix of the fast preview; null where it cannot be had. */
async function fetchMatrix() {
  const url = new URL(`fast_preview/${MODEL}.bin`, import.meta.url),
    answer = await fetch(url, { signal: halt.signal }).catch(() => null),
    bytes = answer?.ok ? await answer.arrayBuffer().catch(() => null) : null;
  return bytes?.byteLength === MATRIX ? new Float32Array(bytes) : null;
}

/** Numbers may come from a link, and a link from anybody. */
function checkWish({ steps, width, height, mask, guidance = 1 }) {
  const whole = (n, low, high) => Number.isInteger(n) && low <= n && n <= high;
  if (!whole(steps, 1, 1000)) throw new RangeError("Steps are a whole number from 1 to 1000.");
  for (const side of [width, height]) {
    if (!whole(side, 16, 2048) || side % 16) {
      throw new RangeError("Width and height are multiples of 16 pixels, at most 2048.");
    }
  }
  if (!(guidance >= 1 && guidance <= 1000)) throw new RangeError("Guidance is a number from 1 to 1000.");
  if (mask && !mask.includes(0)) {
    throw new RangeError("All of the picture is painted, so that nothing would stay: clear the mask, or draw anew.");
  }
}

const parts = {}; // name → promise
let matrix = null; // of the fast preview
function once(name, load) {
  if (parts[name]) return parts[name];
  total += BYTES[name];
  wait();
  return (parts[name] = load()
    .catch((error) => {
      delete parts[name];
      loaded = total = 0;
      throw error;
    })
    .finally(() => clearInterval(waiting)));
}

/** The model, with what a wish takes beside drawing. */
async function open({ reference, model, lora }) {
  if (halt.signal.aborted) halt = new AbortController();
  const klein = await once("first", async () => {
    const [kernel, found] = await Promise.all([fetchKernel(), fetchMatrix()]);
    matrix = found;
    return Klein.open(fetched, kernel);
  });
  if (reference) await once("encoder", () => klein.loadEncoder());
  if (model === "nano-base") await once("base", () => klein.loadBase());
  if (lora) await once(lora, () => loadAdapter(klein, lora));
  return klein;
}

const pause = () => new Promise((resolve) => setTimeout(resolve));

/** What the model reads: text and id of each token, and where in the prompt it stands, in bytes; `mine` if it does. */
function tokens(klein, prompt) {
  const start = TEMPLATE("").indexOf("<|im_end|>"),
    size = new TextEncoder().encode(prompt).length,
    letters = new TextDecoder();
  let to = -start;
  return klein.tokenize(prompt).map((id) => {
    const bytes = klein.tokenizer.bytes(id),
      from = to;
    to += bytes.length;
    return { id, text: letters.decode(bytes), from, to, mine: from >= 0 && from < size };
  });
}

const read = (klein, prompt) => ({
  tokens: tokens(klein, prompt),
  most: klein.index.max_sequence_length,
  wasm: klein.wasm,
});

/** Arrays joined into one, to be moved to the page in one piece. */
function join(arrays) {
  const joined = new Float32Array(arrays.reduce((sum, array) => sum + array.length, 0));
  arrays.reduce((at, array) => {
    joined.set(array, at);
    return at + array.length;
  }, 0);
  return joined;
}

/** What a head multiplies: its queries (s, hd), and behind them its keys divided by √hd (s, hd). */
function factors(M, { q, lq, kT, wide }, s, hd) {
  const both = new Float32Array(2 * s * hd);
  for (let i = 0; i < s; i++) {
    for (let c = 0; c < hd; c++) {
      both[i * hd + c] = M[q + i * lq + c];
      both[(s + i) * hd + c] = M[kT + c * wide + i];
    }
  }
  return both;
}

/** The class Klein with one of the atlas' mistakes: klein.js with another line, as a module of its own. */
const spoiled = {};
function loadMistake(name) {
  return (spoiled[name] ??= (async () => {
    const source = await (await fetch(new URL("klein.js", import.meta.url))).text(),
      url = URL.createObjectURL(new Blob([spoil(source, name)], { type: "text/javascript" }));
    return (await import(url)).Klein;
  })().catch((error) => {
    delete spoiled[name];
    throw error;
  }));
}

/** What a cut does to the features (m, wide) of the words: one is deafened, or two are put in each other's place. */
const spoilWords = ({ token, swap }) => (features, wide) => {
  const of = (i) => features.subarray(i * wide, (i + 1) * wide);
  if (token >= 0) of(token).fill(0);
  if (!swap) return;
  const first = of(swap[0]).slice();
  of(swap[0]).set(of(swap[1]));
  of(swap[1]).set(first);
};

/** Works with a model that is spoiled on purpose, as a wish says: by a `cut`, or by a mistake in its script. */
function spoiling(klein, { cut }, Wrong, work) {
  klein.cut = cut ? { ...cut, words: spoilWords(cut) } : null;
  if (Wrong) Object.setPrototypeOf(klein, Wrong.prototype);
  try {
    return work();
  } finally {
    klein.cut = null;
    Object.setPrototypeOf(klein, Klein.prototype);
  }
}

const work = {
  /** What a wish takes, before anybody asks for a picture. */
  async load(wish) {
    await open(wish);
  },

  async draw(wish, tell, ended) {
    const klein = await open(wish),
      began = performance.now(),
      mask = wish.mask && tokenMask(wish.mask, wish.width, wish.height),
      Wrong = wish.mistake && (await loadMistake(wish.mistake)),
      walk = spoiling(klein, wish, Wrong, () => klein.draw({ ...wish, mask }));
    await pause();
    if (ended()) return { stopped: true }; // newer wishes came while the one before was at work
    tell("read", read(klein, wish.prompt));
    for (;;) {
      const { value: step, done } = spoiling(klein, wish, Wrong, () => walk.next());
      if (done) break;
      const { index, steps, t, tNext } = step,
        last = index + 1 === steps;
      const show = last ||
        (klein.wasm && Math.floor(((index + 1) * PREVIEWS) / steps) > Math.floor((index * PREVIEWS) / steps));
      const about = { index, steps, t, tNext };
      if (show) {
        let { rgba } = spoiling(klein, wish, Wrong, () => klein.decode(step.clean, step.gh, step.gw));
        if (wish.mask) rgba = paste(rgba, wish.reference.rgba, wish.mask);
        tell("step", { ...about, rgba }, [rgba.buffer]);
      } else tell("step", { ...about, rough: matrix && preview(matrix, step.clean, step.gh, step.gw) });
      if (!last) await pause();
      if (ended()) return { stopped: index + 1 < steps };
    }
    return { stopped: false, seconds: (performance.now() - began) / 1000 };
  },

  /** Draws once and tells everything: all attention, the tokens' states after every block, latents and velocities. */
  async look(wish, tell, ended) {
    const klein = await open(wish),
      { max_sequence_length: m, text_encoder_out_layers: taps } = klein.index,
      text = klein.config.text_encoder;
    const { num_attention_heads: heads, in_channels: channels, attention_head_dim: hd } = klein.config.transformer;
    const gh = wish.height / 16,
      gw = wish.width / 16,
      start = noise(wish.seed, gh * gw * channels),
      seen = { attention: [], factors: [], state: [], blocks: [] };
    const steps = klein.draw({ ...wish, start }),
      next = () => {
        klein.watch = (kind, block, values, at) => {
          seen[kind].push(values);
          if (at && !block.startsWith("text")) seen.factors.push(factors(klein.M, at, m + gh * gw, hd));
          if (kind === "state") seen.blocks.push(block);
        };
        try {
          return steps.next();
        } finally {
          klein.watch = null;
        }
      };
    for (let first = true;; first = false) {
      const { value: step, done } = next();
      if (done) break;
      if (first) {
        const waves = Array.from({ length: 21 }, (_, i) => i / 20);
        tell("read", {
          ...read(klein, wish.prompt),
          m,
          s: m + gh * gw,
          d: heads * hd,
          gh,
          gw,
          channels,
          heads,
          hd,
          taps,
          start,
          blocks: seen.blocks.slice(),
          textHeads: text.num_attention_heads,
          textLayers: Math.max(...taps),
          features: klein.encodeText(klein.tokenize(wish.prompt)),
          textAttention: join(seen.attention.splice(0, Math.max(...taps) * text.num_attention_heads)),
          modulation: waves.map((t) => [t, klein.modulation("transformer", t)]),
        });
      }
      const { index, t, tNext, velocity, latents, clean } = step,
        { rgba } = klein.decode(clean, gh, gw);
      const attention = join(seen.attention.splice(0)),
        product = join(seen.factors.splice(0)),
        state = join(seen.state.splice(0));
      tell("step", { index, t, tNext, velocity, latents, clean, rgba, attention, product, state }, [
        attention.buffer,
        product.buffer,
        state.buffer,
      ]);
      await pause();
      if (ended()) return { stopped: true };
    }
  },

  async decode({ latents, gh, gw }) {
    const { rgba, width, height } = (await parts.first).decode(latents, gh, gw);
    return { rgba, width, height };
  },

  async read(wish, tell) {
    // what is typed, once the model is there
    const klein = await parts.first;
    if (klein) tell("read", read(klein, wish.prompt));
  },
};

self.onmessage = async ({ data }) => {
  const { id, kind, prompt = "" } = data,
    wish = { ...data, prompt: foldBlanks(prompt) },
    tell = (kind, what, moved = []) => self.postMessage({ id, kind, ...what }, moved);
  if (kind !== "read" && kind !== "decode") latest = id;
  if (kind === "stop") return halt.abort();
  try {
    if (kind === "draw" || kind === "look") checkWish(wish);
    tell("done", await work[kind](wish, tell, () => id !== latest));
  } catch (error) {
    tell("error", { text: error.message });
  }
};
