// Everything slow happens here, so that the page stays awake. A newer wish, or a stop, ends the one before.
import { Klein, TEMPLATE } from "./klein.js";
import { BYTES, FOLDER } from "./model.js";

const folder = new URL(FOLDER, import.meta.url), plain = new URL(self.location).searchParams.get("wasm") === "0";
const PREVIEWS = 8; // at most, of a long run
let latest = 0, loaded = 0, total = 0;

/** The browser's own store of what it fetched, without the models of earlier days; undefined where there is none. */
const store = (async () => {
  const cache = await self.caches.open("klein-nano");
  for (const request of await cache.keys()) if (!request.url.startsWith(folder)) await cache.delete(request);
  return cache;
})().catch(() => undefined);

async function read(path) {
  const url = new URL(path, folder), kept = await store, found = await kept?.match(url), chunks = [];
  const answer = found ?? await fetch(url).catch(() => ({ ok: false, status: "no connection" }));
  if (!answer.ok) throw new Error(`The model could not be loaded (${path}: ${answer.status}). Reload the page and try again.`);
  const copy = !found && kept && answer.clone();
  for (const reader = answer.body.getReader(); ;) {
    const { done, value } = await reader.read();
    if (done) break;
    chunks.push(value); loaded += value.length;
    self.postMessage({ id: latest, kind: "loading", loaded: Math.min(loaded, total), total });
  }
  if (copy) await kept.put(url, copy).catch(() => 0); // no room: it is fetched again next time
  return new Blob(chunks).arrayBuffer();
}

const parts = {}; // name → promise
function once(name, load) {
  if (!parts[name]) total += BYTES[name];
  return parts[name] ??= load().catch((error) => { delete parts[name]; loaded = total = 0; throw error; });
}

/** The model, with what a wish takes beside drawing. */
async function open({ reference, model }) {
  const klein = await once("first", async () => {
    const kernel = plain ? null : await (await fetch(new URL("gemm.wasm", import.meta.url))).arrayBuffer();
    return Klein.open(read, kernel);
  });
  if (reference) await once("encoder", () => klein.loadEncoder());
  if (model === "nano-base") await once("base", () => klein.loadBase());
  return klein;
}

const pause = () => new Promise((resolve) => setTimeout(resolve));

/** What the model reads: text, id and whether it belongs to the chat template. */
function tokens(klein, prompt) {
  const ids = klein.tokenize(prompt), texts = klein.tokenizer.spell(ids), start = TEMPLATE("").indexOf("<|im_end|>");
  let before = 0; // letters
  return ids.map((id, i) => {
    const mine = before >= start && before < start + prompt.length;
    before += texts[i].length;
    return { id, text: texts[i], mine };
  });
}

const work = {
  async draw(wish, tell, ended) {
    const klein = await open(wish), began = performance.now();
    tell("read", { tokens: tokens(klein, wish.prompt), most: klein.index.nano.max_sequence_length, wasm: klein.wasm });
    for (const step of klein.draw(wish)) {
      const { index, steps, t, t_next } = step, last = index + 1 === steps;
      const show = last || (klein.wasm && Math.floor((index + 1) * PREVIEWS / steps) > Math.floor(index * PREVIEWS / steps) || steps <= PREVIEWS && klein.wasm);
      const picture = show ? klein.decode(step.clean, step.gh, step.gw) : {};
      tell("step", { index, steps, t, t_next, rgba: picture.rgba }, show ? [picture.rgba.buffer] : []);
      if (!last) await pause();
      if (ended()) return { stopped: index + 1 < steps };
    }
    return { stopped: false, seconds: (performance.now() - began) / 1000 };
  },

  async read(wish, tell) { // what is typed, once the model is there
    const klein = await parts.first;
    if (klein) tell("read", { tokens: tokens(klein, wish.prompt), most: klein.index.nano.max_sequence_length, wasm: klein.wasm });
  },
};

self.onmessage = async ({ data: wish }) => {
  const { id, kind } = wish, tell = (kind, what, moved = []) => self.postMessage({ id, kind, ...what }, moved);
  if (kind !== "read") latest = id;
  if (kind === "stop") return;
  try {
    tell("done", await work[kind](wish, tell, () => id !== latest));
  } catch (error) {
    tell("error", { text: error.message });
  }
};
