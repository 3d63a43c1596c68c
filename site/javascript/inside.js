// The page "Look inside": the book's diagram, alive, over the visitor's own sentence. Every box opens a view.
import attention from "./inside/attention.js";
import difference from "./inside/difference.js";
import features from "./inside/features.js";
import latents from "./inside/latents.js";
import modulation from "./inside/modulation.js";
import picture from "./inside/picture.js";
import product from "./inside/product.js";
import reading from "./inside/reading.js";
import tokens from "./inside/tokens.js";
import velocity from "./inside/velocity.js";
import without from "./inside/without.js";
import { look } from "./inside/look.js";
import { number, pictureOf } from "./inside/parts.js";
import { calm, copy, field, make, megabytes, paint, slider } from "./page.js";
import { Painter } from "./painter.js";
import { BYTES, SIZE, STILLS, STORED, WORLD, worlds } from "./world.js";

/** A view: its box, a sentence, its chapter, and what it shows of a run, or of all `together`; `steps`: where the film
 *  chooses the step, `controls`: what else can be chosen. */
const VIEWS = {
  tokens,
  reading,
  features,
  latents,
  attention,
  product,
  modulation,
  velocity,
  picture,
  without,
  difference,
};
const page = document.querySelector("#live-inside"),
  BESIDE =
    { shapes: "a blue circle above a blue square", critters: "a yellow critter with one eye that frowns" }[WORLD];

// ---------------------------------------------------------------- the page

const prompt = make("input", { value: STORED.inside, required: true, autocomplete: "off" }),
  other = make("input", { value: "", placeholder: BESIDE, autocomplete: "off" });
const seed = make("input", {
  value: 7,
  inputmode: "numeric",
  pattern: "\\d{1,15}",
  required: true,
  autocomplete: "off",
});
const open = make("button.chief", {}, "Open it up"),
  status = make(
    "output",
    { role: "status" },
    `Nothing has been loaded yet: this loads ${megabytes(BYTES.first)} once.`,
  );
const form = make(
  "form",
  {},
  make(
    "div.row",
    {},
    field("prompt", "Prompt", prompt),
    field("other", "Beside it (if you like)", other),
    field("seed", "Seed", seed),
    open,
  ),
);
const panel = make("section.stop", { hidden: true, "aria-live": "polite", "aria-label": "Tour" }),
  tour = make("button", { type: "button", hidden: WORLD !== "shapes", onclick: () => visit(0) }, "Take the tour"),
  copyLink = make("button", { type: "button", disabled: true }, "Copy link");
const map = make("div.map", { role: "group", "aria-label": "The way from words to the picture" }),
  film = make("ol.film", { "aria-label": "The picture expected after each step" }),
  choosing = make("div"), // the slider beside it
  stepper = make("div.stepper", {}, film, choosing),
  controls = make("div.row"),
  says = make("p.says"),
  columns = make("div.columns");
page.replaceChildren(
  form,
  make("div.row", {}, worlds(), tour, copyLink),
  make("p", {}, status),
  panel,
  map,
  stepper,
  says,
  controls,
  columns,
);

/** New children. The button that has the keyboard keeps it, if there is one in its place. */
function replace(place, children) {
  const at = [...place.querySelectorAll("button")].indexOf(document.activeElement);
  place.replaceChildren(...children);
  place.querySelectorAll("button")[at]?.focus({ preventScroll: true });
}

/** What is chosen. */
look.show = (withControls) => {
  const view = VIEWS[look.now.view];
  if (withControls) {
    for (const box of map.querySelectorAll("button")) {
      box.setAttribute("aria-pressed", String(box.dataset.view === look.now.view));
    }
    const [file, chapter] = view.chapter;
    says.replaceChildren(`${view.says} `, make("a", { href: `${file}.html` }, `Chapter ${chapter}`), ".");
    replace(controls, view.controls?.() ?? []);
    replace(choosing, [stepSlider()]);
  }
  stepper.hidden = !view.steps;
  [...film.children].forEach((item, i) => {
    if (i + 1 === look.now.step) item.firstChild.setAttribute("aria-current", "step");
    else item.firstChild.removeAttribute("aria-current");
  });
  const { runs } = look;
  replace(
    columns,
    view.together
      ? [make("div.column", {}, ...view.show())]
      : runs.map((run) => make("div.column", {}, runs.length > 1 ? make("h3", {}, run.prompt) : "", ...view.show(run))),
  );
};

/** The boxes and the arrows between them. Before a run a box draws first. */
function diagram() {
  const open = (name) => {
      if (look.runs.length) look.set({ view: name }, true);
      else if (form.reportValidity()) run({ ...linked(), view: name });
    },
    box = (name) =>
      make("button.box", { type: "button", "data-view": name, onclick: () => open(name) }, VIEWS[name].box),
    arrow = () => make("span.to", { "aria-hidden": "true" }, "→");
  map.replaceChildren(
    make(
      "div",
      {},
      make("span.end", {}, "words"),
      arrow(),
      box("tokens"),
      arrow(),
      box("reading"),
      arrow(),
      box("features"),
      make("span.to", { "aria-hidden": "true" }, "↓"),
    ),
    make(
      "div",
      {},
      make("span.end", {}, "noise"),
      arrow(),
      make(
        "span.loop",
        {},
        make("span.times", {}, `↻ ${look.runs[0]?.steps.length ?? 4} times`),
        box("latents"),
        arrow(),
        make("span.field", {}, box("attention"), box("modulation")),
        arrow(),
        box("velocity"),
      ),
      arrow(),
      box("picture"),
    ),
    make("div", {}, box("product"), box("without"), ...(look.runs.length > 1 ? [box("difference")] : [])),
  );
}

/** The film of the first run: a picture chooses its step, and so does the slider beside it. */
function showFilm() {
  const [run] = look.runs;
  film.replaceChildren(
    ...run.steps.map((step, i) => {
      const small = make("canvas", { role: "img", "aria-label": `Expected after step ${i + 1}` }),
        click = () => look.set({ step: i + 1 }, true);
      paint(small, pictureOf(run, step));
      return make("li", {}, make("button", { type: "button", "aria-label": `Step ${i + 1}`, onclick: click }, small));
    }),
  );
}

function stepSlider() {
  const [{ steps }] = look.runs;
  return slider(
    "step",
    { min: 1, max: steps.length, value: look.now.step },
    (v) => look.set({ step: v }),
    (v) => `${v} of ${steps.length}, t = ${number(steps[v - 1].t)}`,
  );
}

/** Before anything is loaded: the film of the form's prompt, as it was when the site was made, and the boxes that it came
 *  through. */
function showStored() {
  const still = (step, as = "img") => {
    const [src, alt] = [`${STILLS}inside-${step}.png`, `Expected after step ${step}`];
    return make(as, { src, alt, width: SIZE, height: SIZE });
  };
  diagram();
  film.replaceChildren(...[1, 2, 3, 4].map((step) => make("li", {}, still(step))));
  says.textContent =
    "A stored run: what is expected after each of four steps, and what came out. Press a box, and your own sentence " +
    "is drawn and opened there.";
  const caption = make("figcaption", {}, STORED.inside);
  columns.replaceChildren(make("div.column", {}, make("figure", {}, caption, still(4, "img.large"))));
}

/** Draw what the form asks for and show it, at `place`: what is set of `now`. Says whether that could be done. */
async function run(place) {
  if (open.disabled) return false; // at work already
  look.painter ??= new Painter();
  open.disabled = tour.disabled = true;
  let done = false;
  try {
    const drawn = [];
    for (const text of [prompt.value, other.value].filter((text) => text.trim())) {
      const run = { prompt: text, seed: BigInt(seed.value), steps: [] };
      status.value = `Drawing “${text}”`;
      await look.painter.ask(
        "look",
        { prompt: text, seed: run.seed, steps: 4, width: SIZE, height: SIZE },
        {
          loading: ({ loaded, total }) => {
            status.value = `Loading: ${megabytes(loaded)} of ${megabytes(total)}`;
          },
          slow: () => {
            status.value = "The connection is slow: nothing comes at the moment.";
          },
          read: (read) => {
            run.read = read;
          },
          step: (step) => run.steps.push(step),
        },
      );
      drawn.push(run);
    }
    look.runs = drawn;
    const [{ read: { gh, gw, tokens }, steps }] = drawn,
      mine = tokens.flatMap((token, i) => (token.mine ? [i] : []));
    const shown = {
      ...look.now,
      step: Math.min(2, steps.length),
      patch: Math.floor(gh / 3) * gw + Math.floor(gw / 2),
      token: mine.at(-1) ?? 0,
      mate: mine[1] ?? mine[0] ?? 0,
      ...place,
    };
    if (!VIEWS[shown.view] || (shown.view === "difference" && drawn.length < 2)) shown.view = "picture";
    copyLink.disabled = false;
    diagram();
    showFilm();
    look.set(shown, true);
    status.value = "Press a box to open it.";
    done = true;
  } catch (error) {
    status.value = error.message;
  }
  open.disabled = tour.disabled = false;
  return done;
}

form.onsubmit = (event) => {
  event.preventDefault();
  panel.hidden = true;
  run(linked());
};
copyLink.onclick = async () => {
  look.writeAddress();
  status.value = `The link to this view is in the ${await copy(location.href) ? "clipboard" : "address bar"}.`;
};

// ---------------------------------------------------------------- the tour: its words are the page's, its places are here

const TOUR = [...document.querySelectorAll("ol.tour > li")];
const STOPS = [
  { view: "picture", step: 1 },
  { view: "tokens" },
  { view: "reading", token: 9, layer: 1, textHead: -1 },
  { view: "features" },
  { view: "latents", step: 4, channel: 0 },
  { view: "attention", step: 2, patch: 8 },
  { view: "attention", step: 2, patch: 8, block: 5 },
  { view: "modulation", step: 1, stream: "img" },
  { view: "velocity", step: 1 },
  { view: "difference", step: 2, block: 3 },
  { view: "without", cut: "block", block: 0 },
];

async function visit(i) {
  if (panel.hidden) {
    prompt.value = STORED.inside;
    other.value = BESIDE;
    seed.value = 7;
    if (!(await run({}))) return;
  }
  look.set({ block: -1, head: -1, ...STOPS[i] }, true);
  const words = TOUR[i].cloneNode(true);
  words.querySelector("img")?.remove(); // the still is for readers without this page
  const to = (name, j) => make("button", { type: "button", disabled: !STOPS[j], onclick: () => visit(j) }, name);
  const next = to("Next", i + 1);
  const end = make("button", { type: "button", onclick: () => (panel.hidden = true) }, "End the tour");
  panel.replaceChildren(
    make("p.count", {}, `${i + 1} of ${STOPS.length}`),
    make("div", {}, ...words.childNodes),
    make("p.row", {}, to("Back", i - 1), next, end),
  );
  panel.hidden = false;
  (next.disabled ? end : next).focus({ preventScroll: true });
  status.value = "";
  panel.scrollIntoView({ block: "start", behavior: calm() ? "auto" : "smooth" });
}

/** What a link sets of `now`. Nothing is drawn before the visitor says so. */
function linked() {
  const told = new URLSearchParams(location.hash.slice(1)),
    place = {};
  if (told.get("prompt") !== prompt.value) return place; // another sentence: another walk
  for (const [name, value] of Object.entries(look.now)) {
    const text = told.get(name);
    if (typeof value === "string" && text !== null) place[name] = text;
    else if (/^-?\d{1,4}(\.5)?$/.test(text ?? "")) place[name] = Number(text);
  }
  return place;
}

showStored();

/** A link's sentences, into the form. */
for (const [name, input] of Object.entries({ prompt, other, seed })) {
  const text = new URLSearchParams(location.hash.slice(1)).get(name);
  if (text) input.value = text;
}
