// The page Draw: a form, a picture that follows what is typed, the film of its steps, and how to change, keep and send it.
// The page Home shows the same, without settings.
import { Brush } from "./brush.js";
import { describeLimits } from "./limits.js";
import { MISTAKES } from "./mistakes.js";
import { calm, copy, field, figure, make, megabytes, paint, save, toggles } from "./page.js";
import { Painter } from "./painter.js";
import { describe, png } from "./png.js";
import { canFilm, sendCard, sendFilm } from "./share.js";
import { follow } from "./typing.js";
import { ADAPTER, BYTES, MODEL, SIZE, STILLS, STORED, WORLD, worlds } from "./world.js";

const EXAMPLES = [
  STORED.draw,
  ...{
    shapes: [
      "a yellow star on a blue background",
      "a red circle above a blue square",
      "a white boat on a blue sea at sunset",
      "a green tree on white snow at night",
      "a purple heart left of a green diamond",
    ],
    critters: [
      "a happy green monster with one eye",
      "a white pot with a cactus and a wink on a blue background",
      "a tall pink critter with a crown and three eyes",
      "a sleepy orange creature with bunny ears on a black background",
      "an orange pot with a flower and angry eyes",
    ],
  }[WORLD],
];
const CHANGES = {
  shapes: [
    "make the background yellow",
    "make it night",
    "turn the circle into a star",
    "make the house blue",
    "remove the square",
  ],
  critters: ["make it frown", "give it one eye", "take off its crown", "make the background green", "make it pink"],
}[WORLD];
const MODELS = {
  [MODEL]: { steps: 4, guidance: 1, says: `${MODEL}: four steps` },
  ...(ADAPTER && {
    [ADAPTER.file]: {
      steps: 1,
      guidance: 1,
      says: `${MODEL} with ${ADAPTER.file}: one step (+${megabytes(BYTES[ADAPTER.file])})`,
    },
  }),
  ...(BYTES.base && {
    "nano-base": { steps: 50, guidance: 4, says: `nano-base: guidance (+${megabytes(BYTES.base)})` },
  }),
};
// What is drawn of a sentence that is being typed. Without an adapter for one step, two show more than one.
const DRAFT = ADAPTER ? { lora: ADAPTER.file, steps: 1 } : { steps: 2 },
  DRAFTED = ADAPTER ? "One step" : "Two steps",
  TITLE = MODEL === "nano" ? "klein-nano" : MODEL;
const SIZES = [
  [0, 0],
  [-32, -32],
  [32, 0],
  [0, 32],
  [32, 32],
].map(([w, h]) => `${Math.max(64, SIZE + w)}x${Math.max(64, SIZE + h)}`); // what can be a reference

const choose = (options) =>
  make("select", {}, ...Object.entries(options).map(([value, text]) => make("option", { value }, text)));
const number = (value, min, max) => make("input", { type: "number", value, min, max, required: true });

const home = document.querySelector("#live-draw-compact"),
  page = document.querySelector("#live-draw") ?? home,
  compact = page === home;
if (!compact) home?.remove(); // the page to print has both

/** Whether a picture may come unasked: not onto a phone, nor where somebody saves data or wants less motion. */
const eager = () => !matchMedia("(pointer: coarse)").matches && !calm() && !navigator.connection?.saveData;

const prompt = make("input", { value: EXAMPLES[0], required: true, autocomplete: "off", enterkeyhint: "go" });
const seed = make("input", {
  value: 7,
  inputmode: "numeric",
  pattern: "\\d+",
  required: true,
  title: "A whole number from 0 to 2⁶⁴ − 1",
  autocomplete: "off",
});
const named = (value) => value.replace("x", " × ") + (value === SIZES[0] ? "" : " (not trained)");
const size = choose(Object.fromEntries(SIZES.map((value) => [value, named(value)])));
const model = choose(Object.fromEntries(Object.entries(MODELS).map(([name, { says }]) => [name, says])));
const steps = number(4, 1, 1000),
  guidance = number(4, 1, 20),
  draw = make("button.chief", {}, "Draw");
guidance.step = 0.5;
const stop = make("button.stops", { type: "button", disabled: true }, "Stop");
const dice = make("button", { type: "button", "aria-label": "Another seed", title: "another seed" }, "⚄");
const guided = field("guidance", "Guidance", guidance);
guided.hidden = true;
const typed = make("input", { type: "checkbox", name: "typed", checked: eager() });
const adapted = make(
  "p",
  { hidden: true },
  `One step, with the adapter ${ADAPTER?.file}: `,
  make("a", { href: "12_fewer_steps.html#one-step-for-nano" }, "chapter 12"),
  " explains it.",
);
const form = make(
  "form",
  { id: "wish" },
  make("div.row", {}, field("prompt", "Prompt", prompt), draw, stop, make("label.check", {}, typed, "draw as I type")),
);
const settings = make(
  "div.row",
  {},
  field("seed", "Seed", seed),
  dice,
  field("size", "Size", size),
  field("steps", "Steps", steps),
  field("model", "Model", model),
  guided,
);
for (const input of settings.querySelectorAll("[name]")) input.setAttribute("form", form.id); // though they stand elsewhere
const choices = (texts, chosen) =>
  make("p.examples", {}, ...texts.map((text) => make("button", { type: "button", onclick: () => chosen(text) }, text)));
const status = make("output", { role: "status" });
const progress = make("progress", { hidden: true, "aria-label": "Loading" });
const canvas = make("canvas", { width: SIZE, height: SIZE, role: "img", "aria-label": "No picture yet" });
const brush = new Brush(canvas, () => told());
const brushing = make("button", { type: "button", "aria-pressed": "false", disabled: true }, "Paint a mask"),
  wipe = make("button", { type: "button", disabled: true }, "Clear the mask");
const film = make("ol.film", { "aria-label": "The picture expected after each step" });
const download = make("button", { type: "button", disabled: true }, "Download PNG"),
  link = make("button", { type: "button", disabled: true }, "Copy link"),
  card = make("button", { type: "button", disabled: true, title: "with its sentence and this address" }, "Send a card"),
  filmed = make("button", { type: "button", disabled: true, hidden: !canFilm() }, "Send the film");
const words = make("p.tokens"),
  reads = make("details", {}, make("summary", {}, "What the model reads"), words);
const change = make("input", { placeholder: CHANGES[0], autocomplete: "off", enterkeyhint: "go" });
const alter = make("button", {}, "Change");
const editing = make("form.row", {}, field("change", "Change this picture", change), alter);
const gallery = make("div.gallery", { "aria-label": "Pictures so far", role: "group" });
const examples = choices(EXAMPLES, (text) => {
    prompt.value = text;
    attempt(() => run(wished()));
  }),
  changes = choices(CHANGES, (text) => {
    change.value = text;
    attempt(runChangedOrFirst);
  });
const picture = make("div", {}, make("div.layers", {}, canvas, brush.sheet), film),
  side = make("div.side", {}, worlds(), examples);
if (!compact) {
  picture.append(make("p.row", {}, brushing, wipe), make("p.row", {}, download, link));
  side.append(settings, adapted, reads, editing, changes);
}
picture.append(make("p.row", {}, card, filmed));
side.append(gallery);
page.replaceChildren(
  form,
  make("p.news", {}, status),
  progress,
  make("div.stage", {}, picture, side),
);

// The page's section on wrong lines: the right picture, beside it the wrong one, and below them what can be wrong.
const beside = make("div.row.maps.beside", { "aria-live": "polite" }),
  note = make("div.note"), // what stands beside the two
  CHOOSE = "Choose a line below. The same words and the same noise are drawn again with it.",
  chapters = [1, 2, 5],
  exchanges = chapters.map((chapter) =>
    toggles(
      `Mistakes of chapter ${chapter}`,
      MISTAKES.filter(([of]) => of === chapter).map(([, name]) => [name, name]),
      null,
      (name) => drawMistake(name),
    )
  );
document
  .querySelector("#live-mistakes")
  ?.replaceChildren(
    beside,
    ...exchanges.map((of, i) => make("div.row.chapter", {}, make("span", {}, `Chapter ${chapters[i]}`), of)),
  );

const blank = { width: SIZE, height: SIZE, rgba: new Uint8ClampedArray(4 * SIZE * SIZE) };
let painter,
  loading, // of the model, before anybody asked for a picture: a promise of whether it came
  shown,
  chosen = null, // of the mistakes: { name, of: the picture beside which it is drawn }
  wrong = false, // a sentence about the form stands there, which loading must not cover
  running = 0;

/** Does what a button asks for and returns its result, or says what is wrong with it. */
async function attempt(work) {
  wrong = false;
  try {
    return await work();
  } catch (error) {
    wrong = true;
    say(error.message);
  }
}

/** What goes on: below the form, and where a mistake waits for its picture. */
function say(text) {
  if (status.value !== text) status.value = text; // said once to those who hear it
  if (chosen && !chosen.of) note.textContent = text;
}

/** How loading goes on, to be heard; `quiet` says when nobody wants to know any more. */
const hearLoading = (quiet) => ({
  loading: ({ loaded, total }) => {
    if (quiet()) return;
    progress.hidden = false;
    progress.max = total;
    progress.value = loaded;
    if (!wrong) say(`Loading: ${megabytes(loaded)} of ${megabytes(total)}`);
  },
  slow: () => {
    if (!quiet() && !wrong) say("The connection is slow: nothing comes at the moment. Wait, or press Stop to give up.");
  },
});

/** The model loads behind the stored picture as soon as somebody touches the form, and not before. */
page.addEventListener("focusin", () => !painter && eager() && load(), { once: true });
typed.onchange = () => !painter && typed.checked && load();
function load() {
  return (loading ??= loadBehind());
}
async function loadBehind() {
  const quiet = () => page.matches("[aria-busy=true]");
  let came = false;
  painter ??= new Painter();
  stop.disabled = false;
  try {
    await painter.ask("load", chosenModel(), hearLoading(quiet));
    came = true;
    if (!quiet() && !wrong) say(`The model is here: ${typed.checked ? "type, or " : ""}press Draw.`);
  } catch (error) {
    if (!quiet()) say(error.message);
    loading = undefined; // what is typed next begins it again
  }
  if (!quiet()) progress.hidden = stop.disabled = true;
  return came;
}

/** What is typed is drawn in one step or two, and when no more comes in those of the form. */
const forget = follow(prompt, {
  wanted: () => typed.checked && !typed.disabled,
  draft: (text) =>
    attempt(async () => {
      if (!(await load())) return false;
      if (text !== prompt.value.trim()) return true; // meanwhile more was typed
      const wish = { ...wished(), prompt: text };
      return wish.lora ? true : run({ ...wish, ...DRAFT }, "draft"); // in one step it needs no other
    }),
  finish: (text) => attempt(() => run({ ...wished(), prompt: text }, "typed")),
});

/** The model of the form, and its adapter if it has one. */
const chosenModel =
  () => (model.value === ADAPTER?.file ? { model: MODEL, lora: ADAPTER.file } : { model: model.value });

/** What the form says, or a sentence on what is wrong with it. */
function wished() {
  const [width, height] = size.value.split("x").map(Number),
    value = seed.value.trim();
  if (!/^\d+$/.test(value) || BigInt(value) >= 2n ** 64n) {
    throw new Error(`A seed is a whole number from 0 to 2⁶⁴ − 1, ${value || "nothing"} is not.`);
  }
  return {
    prompt: prompt.value,
    seed: BigInt(value),
    steps: Number(steps.value),
    width,
    height,
    ...chosenModel(),
    guidance: model.value === "nano-base" ? Number(guidance.value) : 1,
  };
}

/** The same again with the picture that is shown as reference. */
function changed() {
  const { rgba, width, height } = shown.picture;
  return {
    ...wished(),
    prompt: change.value || CHANGES[0],
    width,
    height,
    reference: { rgba, width, height },
    mask: brush.painted(),
    first: shown.wish.first ?? shown.wish,
  };
}

/** Changes the picture that is shown. It stays in the row, also if it was only typed. */
function runChanged() {
  const wish = changed();
  hang(shown);
  return run(wish);
}

/** The same where nothing was drawn yet: what the form says comes first. */
async function runChangedOrFirst() {
  if (shown || (await run(wished()))) await runChanged();
}

/** What the brush changes in the form. */
function told() {
  const painted = brush.painted();
  wipe.disabled = !painted;
  alter.textContent = painted ? "Change what is painted" : "Change";
}

brushing.onclick = () => {
  const now = brush.sheet.hidden;
  brush.sheet.hidden = !now;
  brushing.setAttribute("aria-pressed", String(now));
  if (!now) return;
  paint(canvas, shown.picture);
  say("Paint over what may change, and say below what is to be there. All other pixels stay as they are.");
  status.scrollIntoView({ block: "nearest" }); // on a phone it may stand above the screen
};
wipe.onclick = () => brush.set(null);

function busy(now) {
  stop.disabled = !now;
  page.setAttribute("aria-busy", now);
  for (const element of [download, link, card, filmed, brushing]) element.disabled = !shown;
}

/** Draws, and says whether it came to its end. way: "asked" for by a button, "typed", or a "draft" of what is being typed;
 *  while somebody types, nothing moves but the picture. */
async function run(wish, way = "asked") {
  const mine = ++running,
    frames = [],
    pictures = [],
    { width, height } = wish,
    still = calm() || way !== "asked",
    limits = describeLimits(wish.model, wish.prompt, width, height);
  painter ??= new Painter();
  busy(true);
  if (way === "asked") {
    forget();
    film.replaceChildren();
    progress.removeAttribute("value");
    say("Loading");
    progress.hidden = false;
  }
  let seen = null,
    last = null, // step that was told: not each comes with a picture
    complete = false,
    slow = "";
  const keep = (step) => {
    const picture = { rgba: step.rgba, width, height },
      small = paint(document.createElement("canvas"), picture);
    small.setAttribute("aria-hidden", "true");
    const look = make(
      "button",
      {
        type: "button",
        "aria-label": `Show the picture expected after step ${step.index + 1}`,
        onclick: () => paint(canvas, picture),
      },
      small,
      make("span", {}, `t = ${step.tNext.toFixed(2)}`),
    );
    frames.push(make("li", {}, look));
    pictures.push(picture);
    seen = { picture, step };
    if (!still) {
      film.append(frames.at(-1));
      paint(canvas, picture);
    }
  };
  try {
    const { stopped, seconds } = await painter.ask("draw", wish, {
      ...hearLoading(() => mine !== running),
      read: (found) => {
        if (mine !== running) return;
        progress.hidden = true;
        tell(found);
        if (!found.wasm) {
          slow = " This browser runs without WebAssembly here: slower, and on the way there are rough pictures only.";
        }
      },
      step: (step) => {
        if (mine !== running) return;
        last = step;
        brush.sheet.hidden = true; // the film is seen
        brushing.setAttribute("aria-pressed", "false");
        if (way === "asked") {
          say(
            `Step ${step.index + 1} of ${step.steps}, noise level ${step.t.toFixed(2)} to ${step.tNext.toFixed(2)}.`,
          );
        }
        if (step.rgba) keep(step);
        else if (step.rough && !still) enlarge(step.rough, wish);
      },
    });
    if (mine !== running) return false;
    complete = !stopped;
    if (!last) say("Stopped before the first step.");
    else if (!seen) {
      say(`Stopped after ${last.index + 1} of ${last.steps} steps, before the first picture was decoded.`);
    } else {
      if (still) film.replaceChildren(...frames);
      if (way === "draft" && complete) say(`${DRAFTED} so far. Pause, and ${MODEL} draws it in ${steps.value}.`);
      else {
        say(
          (stopped
            ? `Stopped after ${last.index + 1} of ${seen.step.steps} steps: this is the picture expected from there.`
            : `Drawn in ${seconds.toFixed(1)} s.`) +
            slow +
            (limits && ` ${limits}`),
        );
      }
      show({ picture: seen.picture, pictures, wish, stopped });
      if (way === "asked") hang(shown);
      if (way !== "draft") remember();
    }
  } catch (error) {
    if (mine === running) say(error.message);
  }
  if (mine === running) {
    progress.hidden = true;
    busy(false);
  }
  return complete;
}

/** A picture that somebody asked for, to be shown again later. */
function hang(drawn) {
  if (drawn.hangs) return;
  drawn.hangs = true;
  const small = paint(document.createElement("canvas"), drawn.picture),
    again = () => {
      show(drawn);
      remember();
    };
  gallery.prepend(
    make("button", { type: "button", "aria-label": `Show again: ${drawn.wish.prompt}`, onclick: again }, small),
  );
}

/** Marks a mistake as chosen, or none. */
function mark(name) {
  chosen = name && { name };
  for (const button of exchanges.flatMap((of) => [...of.children])) {
    button.setAttribute("aria-pressed", String(button.textContent === name));
  }
}

/** The right picture, and beside it the one with a mistake, or room for it. */
function pair(right, title, wrong, ...words) {
  const { width, height } = right;
  note.replaceChildren(...words);
  beside.replaceChildren(
    figure(paint(make("canvas", { role: "img", "aria-label": "Right" }), right), "right"),
    figure(
      wrong
        ? paint(make("canvas.wrong", { role: "img", "aria-label": title }), { rgba: wrong, width, height })
        : make("canvas", { width, height, "aria-hidden": "true" }),
      title,
    ),
    note,
  );
}

/** The picture that is shown, drawn again with a mistake, beside the right one. */
async function drawMistake(name) {
  mark(name);
  const mine = chosen,
    [, , lines] = MISTAKES.find(([, its]) => its === name);
  pair(shown?.picture ?? blank, name, null, "Drawing …");
  beside.scrollIntoView({ block: "nearest", behavior: calm() ? "auto" : "smooth" }); // on a phone the rows are long
  let rgba;
  try {
    const there = shown || (await run(wished()));
    if (mine !== chosen) return;
    if (!there) throw new Error("Without a picture there is nothing to draw it beside.");
    mine.of = shown;
    pair(shown.picture, name, null, "Drawing …");
    remember();
    const { stopped } = await painter.ask(
      "draw",
      { ...shown.wish, mistake: name },
      { step: (step) => (rgba = step.rgba ?? rgba) },
    );
    if (mine !== chosen) return;
    if (stopped || !rgba) throw new Error("Stopped.");
  } catch (error) {
    if (mine !== chosen) return;
    mark(null);
    note.textContent = error.message;
    return;
  }
  const { picture } = mine.of,
    apart = rgba.reduce((sum, level, i) => sum + Math.abs(level - picture.rgba[i]), 0) / (0.75 * rgba.length);
  pair(
    picture,
    name,
    rgba,
    make(
      "pre",
      { tabindex: 0 },
      make("code", {}, lines.map(([right, wrong]) => `- ${right}\n+ ${wrong}`).join("\n")),
    ),
    make("p", {}, `${apart.toFixed(1)} of 255 levels changed on average.`),
  );
}

/** A rough picture, as large as the picture will be. */
function enlarge(rough, { width, height }) {
  const small = paint(document.createElement("canvas"), rough);
  Object.assign(canvas, { width, height });
  canvas.getContext("2d").drawImage(small, 0, 0, width, height);
}

function show(drawn) {
  const waits = chosen && !chosen.of; // a mistake, for this picture
  shown = drawn;
  if (!waits && chosen?.of !== drawn) {
    mark(null); // what stands beside is another picture's
    pair(drawn.picture, "one line wrong", null, CHOOSE);
  }
  paint(canvas, drawn.picture);
  brush.set(null); // a mask that nobody sees would change the next picture
  canvas.setAttribute("aria-label", `Drawn by ${TITLE}: ${drawn.wish.prompt}`);
  download.title = drawn.stopped
    ? "A run that was stopped cannot be drawn again from its file"
    : drawn.wish.reference
    ? "Drawn again with --like and the picture before as --image"
    : "";
  busy(false);
}

/** What is shown, into the address. */
function remember() {
  if (compact) return; // what is sent to others leads to the page with all settings
  const { wish } = shown,
    root = wish.first ?? wish,
    { width, height } = root;
  const about = {
    prompt: root.prompt,
    seed: root.seed,
    size: `${width}x${height}`,
    steps: root.steps,
    model: root.model,
    ...(root.lora && { lora: root.lora }),
    ...(root.guidance > 1 && { guidance: root.guidance }),
    ...(wish.first && { change: wish.prompt }),
    ...(chosen && { mistake: chosen.name }),
  };
  history.replaceState(null, "", `#${new URLSearchParams(about)}`);
}

function tell({ tokens, most }) {
  words.replaceChildren(
    ...tokens.map(({ id, text, mine }) =>
      make(mine ? "span.mine" : "span", { title: `id ${id}` }, text.replace(/\n/g, "↵"), make("sub", {}, String(id)))
    ),
  );
  words.append(` ${tokens.length} of ${most} tokens; the pale ones are the chat template.`);
}

form.onsubmit = (event) => {
  event.preventDefault();
  attempt(() => run(wished()));
};
editing.onsubmit = (event) => {
  event.preventDefault();
  attempt(runChangedOrFirst);
};
stop.onclick = () => painter.stop();
dice.onclick = () => {
  seed.value = Math.floor(Math.random() * 2 ** 31);
  form.requestSubmit();
};
model.onchange = () => {
  ({ steps: steps.value, guidance: guidance.value } = MODELS[model.value]);
  guided.hidden = model.value !== "nano-base";
  adapted.hidden = model.value !== ADAPTER?.file;
  typed.disabled = model.value === "nano-base"; // a minute a picture: too slow to follow anybody
};
prompt.oninput = () => {
  if (wrong && !prompt.value.trim()) {
    wrong = false;
    say(""); // what was wrong with a sentence that is gone
  }
  if (shown && !typed.checked && !page.matches("[aria-busy=true]")) {
    painter.ask("read", { prompt: prompt.value }, { read: tell }).catch((error) => say(error.message));
  }
};
const fileName = ({ prompt, seed }) => `${prompt.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60)}-${seed}`;
download.onclick = async () => save(await png(shown.picture, describe(shown.wish)), `${fileName(shown.wish)}.png`);
card.onclick = () => attempt(() => sendCard(shown.picture, shown.wish.prompt, fileName(shown.wish)));
filmed.onclick = () =>
  attempt(async () => {
    const { pictures, wish } = shown;
    filmed.disabled = true; // a few seconds
    try {
      await sendFilm(pictures, wish.prompt, fileName(wish));
    } finally {
      filmed.disabled = false;
    }
  });
link.onclick = async () => {
  remember();
  say(
    await copy(location.href)
      ? "The link is in the clipboard; it stands in the address bar, too."
      : "The link stands in the address bar.",
  );
};

/** A link's wishes, into the form; nothing is drawn before the visitor says so. */
function fill() {
  const told = new URLSearchParams(location.hash.slice(1)),
    set = (name, input) => {
      if (told.has(name)) input.value = told.get(name);
    };
  const wanted = told.get("lora") ?? told.get("model") ?? MODEL;
  if (model.querySelector(`[value="${CSS.escape(wanted)}"]`)) {
    model.value = wanted;
    model.onchange();
  }
  set("prompt", prompt);
  set("seed", seed);
  set("steps", steps);
  set("guidance", guidance);
  set("change", change);
  if (SIZES.includes(told.get("size"))) size.value = told.get("size");
}

/** A mistake of a link: offered, and drawn once the visitor says so. */
function offered() {
  const mistake = new URLSearchParams(location.hash.slice(1)).get("mistake");
  if (!MISTAKES.some(([, its]) => its === mistake)) return [CHOOSE];
  const press = make("button", { type: "button", onclick: () => drawMistake(mistake) }, `Draw with “${mistake}”`);
  return [make("p", {}, "The link leads to this mistake: ", press)];
}

/** Before anything is loaded: the run of the first example, drawn when the site was made (`python site/live.py`). */
function showStored() {
  const pictures = [1, 2, 3, 4].map((step) =>
    make("img", { src: `${STILLS}draw-${step}.png`, width: SIZE, height: SIZE, alt: `Expected after step ${step}` })
  );
  const last = make("img", { src: `${STILLS}draw-4.png` }),
    lay = (right) => pair(right, "one line wrong", null, ...offered());
  lay(blank);
  last.onload = () => {
    if (shown || running) return;
    const paper = canvas.getContext("2d");
    paper.drawImage(last, 0, 0, SIZE, SIZE);
    lay({ ...blank, rgba: paper.getImageData(0, 0, SIZE, SIZE).data });
  };
  film.replaceChildren(...pictures.map((picture) => make("li", {}, picture)));
  canvas.setAttribute("aria-label", `Drawn by ${TITLE}: ${EXAMPLES[0]}`);
  const own = new URLSearchParams(location.hash.slice(1)),
    same = { prompt: EXAMPLES[0], seed: "7", size: SIZES[0], steps: "4", model: MODEL, lora: null, change: null },
    other = filled && Object.entries(same).some(([name, value]) => own.get(name) !== value);
  status.value =
    (other
      ? `A stored run of “${EXAMPLES[0]}”: Draw draws what the link says.`
      : `A stored run of this prompt${typed.checked ? ": change a word, and the picture follows" : ""}.`) +
    ` Nothing has been loaded yet; your first picture loads ${megabytes(BYTES.first)}, once.`;
}

const filled = !compact && location.hash.includes("=");
if (filled) fill();
showStored();
if (filled && note.querySelector("button")) document.querySelector("#one-line")?.scrollIntoView();
