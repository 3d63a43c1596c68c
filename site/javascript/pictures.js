// Four drawings, and a network that learns to draw such pictures from noise, while one watches.
import { chart } from "./charts.js";
import { figure, make, paint, toggles } from "./page.js";

const SIDE = 96, // pixels of a paper; the network sees a quarter of them
  PAPER = "rgb(243 242 238)",
  COLORS = { red: "rgb(214 48 49)", yellow: "rgb(250 211 60)", green: "rgb(60 160 82)", blue: "rgb(58 96 214)" },
  KINDS = ["circle", "square", "triangle", "star"],
  BOOK = ["a red circle", "a yellow square", "a green triangle", "a blue star"],
  OWN = "my drawing";

/** Corners of a shape around its middle, as microflow has them. */
function corners(kind) {
  const ring = (count, far) =>
    Array.from({ length: count }, (_, i) => {
      const angle = 2 * Math.PI * i / count;
      return [far(i) * Math.sin(angle), -far(i) * Math.cos(angle)];
    });
  return {
    circle: () => ring(40, () => 1),
    square: () => [[-0.86, -0.86], [0.86, -0.86], [0.86, 0.86], [-0.86, 0.86]],
    triangle: () => [[0, -1], [1, 0.8], [-1, 0.8]],
    star: () => ring(10, (i) => i % 2 ? 0.46 : 1.1),
  }[kind]();
}

/** A paper of one drawing: a sentence of the book's chosen below it, or what the pointer leaves. */
class Paper {
  constructor(sentence, changed, pen) {
    this.canvas = make("canvas.sketch", { width: SIDE, height: SIDE, role: "img" });
    this.choice = make("select", {
      "aria-label": "what stands on this paper",
      onchange: () => {
        this.show(this.choice.value);
        changed();
      },
    });
    for (const color of Object.keys(COLORS)) {
      for (const kind of KINDS) this.choice.append(make("option", {}, `a ${color} ${kind}`));
    }
    this.choice.append(make("option", {}, OWN));
    this.element = make("div.sketchbook", {}, this.canvas, this.choice);
    this.show(sentence);
    let last = null;
    const at = (event) => {
      const box = this.canvas.getBoundingClientRect();
      return [(event.clientX - box.left) / box.width * SIDE, (event.clientY - box.top) / box.height * SIDE];
    };
    this.canvas.onpointerdown = (event) => {
      if (!pen.down || event.button !== 0) return;
      this.canvas.setPointerCapture(event.pointerId);
      if (this.choice.value !== OWN) this.show(OWN);
      last = at(event);
      this.stroke(last, last, pen.color);
    };
    this.canvas.onpointermove = (event) => {
      if (!last) return;
      const next = at(event);
      this.stroke(last, next, pen.color);
      last = next;
    };
    this.canvas.onpointerup = this.canvas.onpointercancel = () => {
      if (last) changed();
      last = null;
    };
  }

  get name() {
    return this.choice.value;
  }

  get context() {
    return this.canvas.getContext("2d", { willReadFrequently: true });
  }

  show(sentence) {
    const { context } = this;
    this.choice.value = sentence;
    this.canvas.setAttribute("aria-label", sentence);
    context.fillStyle = PAPER;
    context.fillRect(0, 0, SIDE, SIDE);
    if (sentence === OWN) return;
    const [, color, kind] = sentence.split(" ");
    context.fillStyle = COLORS[color];
    context.beginPath();
    for (const [x, y] of corners(kind)) context.lineTo(SIDE * (0.5 + 0.3 * x), SIDE * (0.5 + 0.3 * y));
    context.fill();
  }

  stroke(from, to, color) {
    const { context } = this;
    Object.assign(context, { strokeStyle: COLORS[color], lineWidth: 14, lineCap: "round" });
    context.beginPath();
    context.moveTo(...from);
    context.lineTo(...to);
    context.stroke();
  }

  get drawing() {
    return { rgba: this.context.getImageData(0, 0, SIDE, SIDE).data, width: SIDE };
  }
}

/** Puts the tab into a place of a page. */
export function showPictures(place) {
  const coarse = matchMedia("(pointer: coarse)").matches,
    pen = { color: "red", down: !coarse }, // a swipe is to scroll the page
    status = make("output", { role: "status" }),
    train = make("button.chief", { type: "button" }, "Train"),
    again = make("button", { type: "button", disabled: true }, "Walk from other noise"),
    curve = make("div", {}),
    [given, guessed, walk] = ["given", "guessed", "walk"].map((name) => make(`canvas.heat.${name}`));
  const papers = BOOK.map((sentence) => new Paper(sentence, forget, pen));
  let worker, losses, state, seed = 1;

  /** Other drawings: what was learned of the ones before is forgotten. */
  function forget() {
    worker?.terminate();
    worker = null;
    losses = [];
    state = { learning: false, done: 0, steps: 0 };
    for (const [canvas, columns] of [[given, 5], [guessed, 5], [walk, 6]]) {
      canvas.width = 24 * columns; // which empties it, too
      canvas.height = 96;
    }
    curve.replaceChildren();
    again.disabled = true;
    say();
  }

  function say() {
    const { learning, done, steps } = state, loss = losses.at(-1)?.[1].toFixed(3);
    status.value = learning
      ? done ? `Learning: step ${done} of ${steps}, loss ${loss}.` : "Learning begins."
      : done
      ? `Learned for ${done} steps, loss ${loss}.`
      : "Nothing learned yet. Choose or draw four pictures, then press Train: it takes about a minute.";
    train.textContent = learning ? "Stop" : done && done < steps ? "Go on" : "Train";
  }

  function hear({ data }) {
    const { kind, done, steps, loss } = data;
    if (data.given) {
      Object.assign(state, { done, steps });
      paint(given, data.given);
      paint(guessed, data.guessed);
    }
    if (loss !== undefined) {
      losses.push([done, loss]);
      const about = { title: "loss", x: "steps", y: "squared error", xlim: [0, steps], floor: 0 };
      curve.replaceChildren(chart({ ...about, series: { loss: losses } }));
    }
    if (data.walk) {
      paint(walk, data.walk);
      again.disabled = false;
    }
    if (kind === "stopped") state.learning = false;
    say();
  }

  function failed() {
    forget();
    status.value = "This browser cannot start the script that learns (a module in a worker): a newer one can.";
  }

  train.onclick = () => {
    if (state.learning) return worker.postMessage({ kind: "stop" });
    const goOn = state.done && state.done < state.steps;
    if (!goOn) {
      forget();
      worker = new Worker(new URL("learner.js", import.meta.url), { type: "module" });
      worker.onmessage = hear;
      worker.onerror = failed;
    }
    worker.postMessage({ kind: "train", drawings: goOn ? null : papers.map((paper) => paper.drawing) });
    state.learning = true;
    again.disabled = true;
    say();
  };
  again.onclick = () => worker.postMessage({ kind: "walk", seed: ++seed });

  const scrolls = () => {
    for (const { canvas } of papers) canvas.classList.toggle("scrolls", !pen.down);
  };
  const pens = make("div", {});
  if (coarse) {
    pens.append(toggles("a swipe", [["swipe scrolls", false], ["swipe draws", true]], pen.down, (down) => {
      pen.down = down;
      scrolls();
    }));
  }
  pens.append(
    toggles("the pen's color", Object.keys(COLORS).map((color) => [`${color} pen`, color]), pen.color, (color) => {
      pen.color = color;
    }),
  );
  place.replaceChildren(
    make("div.sketches", {}, ...papers.map((paper) => paper.element)),
    pens,
    make("div.row", {}, train, again),
    make("p", {}, status),
    make(
      "div.row.learned",
      {},
      figure(given, "Given: noisy pictures, t = 1, 0.8, 0.6, 0.4, 0.2"),
      figure(guessed, "Guessed: the picture behind each"),
      figure(walk, "The walk: noise, then every second of 10 steps"),
      curve,
    ),
  );
  scrolls();
  forget();
  return () => worker?.terminate();
}
