// Everything slow happens here, so that the page stays awake. A newer wish, or a stop, ends the one before.
import { Klein, noise, TEMPLATE } from "./klein.js";
import { BYTES, FOLDER } from "./model.js";

const folder = new URL(FOLDER, import.meta.url),
  plain = new URL(self.location).searchParams.get("wasm") === "0";
const PREVIEWS = 8; // at most, of a long run
let latest = 0,
  loaded = 0,
  total = 0;

/** The browser's own store of what it fetched, without the models of earlier days; undefined where there is none. */
const store = (async () => {
  const cache = await self.caches.open("klein-nano");
  for (const request of await cache.keys()) if (!request.url.startsWith(folder)) await cache.delete(request);
  return cache;
})().catch(() => undefined);

async function fetched(path) {
  const url = new URL(path, folder),
    kept = await store,
    found = await kept?.match(url),
    chunks = [];
  const answer = found ?? (await fetch(url).catch(() => ({ ok: false, status: "no connection" })));
  if (!answer.ok)
    throw new Error(`The model could not be loaded (${path}: ${answer.status}). Reload the page and try again.`);
  const copy = !found && kept && answer.clone();
  for (const reader = answer.body.getReader(); ;) {
    const { done, value } = await reader.read();
    if (done) break;
    chunks.push(value);
    loaded += value.length;
    self.postMessage({ id: latest, kind: "loading", loaded: Math.min(loaded, total), total });
  }
  if (copy) await kept.put(url, copy).catch(() => 0); // no room: it is fetched again next time
  return new Blob(chunks).arrayBuffer();
}

const parts = {}; // name → promise
function once(name, load) {
  if (!parts[name]) total += BYTES[name];
  return (parts[name] ??= load().catch((error) => {
    delete parts[name];
    loaded = total = 0;
    throw error;
  }));
}

/** The model, with what a wish takes beside drawing. */
async function open({ reference, model }) {
  const klein = await once("first", async () => {
    const kernel = plain ? null : await (await fetch(new URL("gemm.wasm", import.meta.url))).arrayBuffer();
    return Klein.open(fetched, kernel);
  });
  if (reference) await once("encoder", () => klein.loadEncoder());
  if (model === "nano-base") await once("base", () => klein.loadBase());
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

/** Arrays behind each other in one, to be moved to the page in one piece. */
function join(arrays) {
  const joined = new Float32Array(arrays.reduce((sum, array) => sum + array.length, 0));
  arrays.reduce((at, array) => {
    joined.set(array, at);
    return at + array.length;
  }, 0);
  return joined;
}

const work = {
  async draw(wish, tell, ended) {
    const klein = await open(wish),
      began = performance.now();
    tell("read", read(klein, wish.prompt));
    for (const step of klein.draw(wish)) {
      const { index, steps, t, t_next } = step,
        last = index + 1 === steps;
      const show =
        last ||
        (klein.wasm && Math.floor(((index + 1) * PREVIEWS) / steps) > Math.floor((index * PREVIEWS) / steps)) ||
        (steps <= PREVIEWS && klein.wasm);
      const picture = show ? klein.decode(step.clean, step.gh, step.gw) : {};
      tell("step", { index, steps, t, t_next, rgba: picture.rgba }, show ? [picture.rgba.buffer] : []);
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
      seen = { attention: [], state: [], blocks: [] };
    const steps = klein.draw({ ...wish, start }),
      next = () => {
        klein.watch = (kind, block, values) => {
          seen[kind].push(values);
          if (kind === "state") seen.blocks.push(block);
        };
        try {
          return steps.next();
        } finally {
          klein.watch = null;
        }
      };
    for (let first = true; ; first = false) {
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
      const { index, t, t_next, velocity, latents, clean } = step,
        { rgba } = klein.decode(clean, gh, gw);
      const attention = join(seen.attention.splice(0)),
        state = join(seen.state.splice(0));
      tell("step", { index, t, t_next, velocity, latents, clean, rgba, attention, state }, [
        attention.buffer,
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

self.onmessage = async ({ data: wish }) => {
  const { id, kind } = wish,
    tell = (kind, what, moved = []) => self.postMessage({ id, kind, ...what }, moved);
  if (kind !== "read" && kind !== "decode") latest = id;
  if (kind === "stop") return;
  try {
    tell("done", await work[kind](wish, tell, () => id !== latest));
  } catch (error) {
    tell("error", { text: error.message });
  }
};
