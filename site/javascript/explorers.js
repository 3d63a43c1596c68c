// The explorers of chapters 0, 2, 4 and 5: the notebooks' widgets, with the same controls, where their stills stand.
import { chart, heat, overlay } from "./charts.js";
import { empiricalMu, imageIds, ropeTable, schedule } from "./klein.js";
import { figure, make, megabytes, paint, slider, toggles } from "./page.js";
import { Painter } from "./painter.js";
import { showToy } from "./toy.js";
import { BYTES, SIZE } from "./world.js";

const PROMPT = "a red circle above a blue square",
  SEED = 7;
let painter;

function scheduleExplorer(place) {
  const now = { steps: 4, size: 1024 },
    charts = make("div.row");
  const draw = () => {
    const { steps, size } = now,
      n = Math.floor(size / 16) ** 2,
      line = Array.from({ length: steps + 1 }, (_, i) => 1 - i / steps),
      mu = empiricalMu(n, steps);
    const points = (values) => values.map((t, i) => [i, t]),
      tokens = Array.from({ length: 1024 }, (_, i) => 16 + 16 * i);
    charts.replaceChildren(
      chart({
        title: `${steps} steps, ${size} × ${size} pixels`,
        x: "step",
        y: "noise level t",
        ylim: [0, 1],
        series: {
          klein: points(schedule(steps, n)),
          linear: points(line),
        },
      }),
      chart({
        title: `n = ${n.toLocaleString("en")}: mu = ${mu.toFixed(2)}, shift ${Math.exp(mu).toFixed(2)}`,
        x: "image tokens n",
        y: "mu",
        ylim: [0, 3.5],
        mark: n,
        dots: ["mu"],
        series: { mu: tokens.map((count) => [count, empiricalMu(count, steps)]) },
      }),
    );
  };
  place.append(
    make(
      "div.row",
      {},
      slider("steps", { min: 1, max: 50, value: 4 }, (v) => {
        now.steps = v;
        draw();
      }),
      slider("size", { min: 64, max: 2048, step: 16, value: 1024 }, (v) => {
        now.size = v;
        draw();
      }),
    ),
    charts,
  );
  draw();
}

function ropeExplorer(place) {
  const grid = 16;
  const now = { row: grid / 2, column: Math.floor(grid / 3), among: 0 },
    half = 64,
    times = [0, 10, 20, 30];
  const tables = Object.fromEntries(times.map((t) => [t, ropeTable(imageIds(grid, grid, t), [32, 32, 32, 32], 2000)]));
  const axes = { "all axes": [0, 64], "only h": [16, 32], "only w": [32, 48] },
    maps = make("div.row.maps"),
    controls = make("div.row");
  // Two patches seen through a rotation of all their pairs: the mean cosine of the angles between them.
  const similar = (t, [from, to], here) =>
    Array.from({ length: grid * grid }, (_, i) => {
      let sum = 0;
      for (let c = from; c < to; c++) {
        sum += tables[t].cos[i * half + c] * tables[0].cos[here * half + c] +
          tables[t].sin[i * half + c] * tables[0].sin[here * half + c];
      }
      return sum / (to - from);
    });
  const lowest = Object.fromEntries(
    Object.entries(axes).map(([name, part]) => [
      name,
      times.reduce(
        (low, t) =>
          Math.min(low, ...Array.from({ length: grid * grid }, (_, here) => Math.min(...similar(t, part, here)))),
        1,
      ),
    ]),
  );
  const draw = () => {
    const here = now.row * grid + now.column;
    maps.replaceChildren(
      ...Object.entries(axes).map(([name, part], i) => {
        const seen = similar(now.among, part, here),
          canvas = heat(make("canvas"), seen, grid, grid, {
            min: lowest[name],
            max: 1,
          });
        canvas.getContext("2d").fillStyle = "#d63031";
        canvas.getContext("2d").fillRect(now.column + 0.25, now.row + 0.25, 0.5, 0.5);
        if (i === 0) {
          canvas.onclick = (event) => {
            const box = canvas.getBoundingClientRect(),
              at = (share) => Math.min(grid - 1, Math.max(0, Math.floor(share * grid)));
            now.column = at((event.clientX - box.left) / box.width);
            now.row = at((event.clientY - box.top) / box.height);
            steer();
            draw();
          };
        }
        return figure(canvas, `${name}: ${Math.min(...seen).toFixed(2)} to ${Math.max(...seen).toFixed(2)}`);
      }),
    );
  };
  const steer = () =>
    controls.replaceChildren(
      slider("row", { min: 0, max: grid - 1, value: now.row }, (v) => {
        now.row = v;
        draw();
      }),
      slider("column", { min: 0, max: grid - 1, value: now.column }, (v) => {
        now.column = v;
        draw();
      }),
    );
  steer();
  place.append(
    controls,
    toggles("among", [["its own picture", 0], ...times.slice(1).map((t) => [`a reference at t = ${t}`, t])], 0, (t) => {
      now.among = t;
      draw();
    }),
    maps,
  );
  draw();
}

/** A button over a still; what it loads replaces both. */
function onDemand(place, still, begin) {
  const status = make("output", { role: "status" }),
    button = make("button", { type: "button" }, `Make it alive (loads ${megabytes(BYTES.first)} once)`);
  still.before(place);
  place.append(make("p.row", {}, button, status));
  button.onclick = async () => {
    button.disabled = true;
    painter ??= new Painter();
    try {
      const steps = [];
      let read;
      await painter.ask(
        "look",
        { prompt: PROMPT, seed: BigInt(SEED), steps: 4, width: SIZE, height: SIZE },
        {
          loading: ({ loaded, total }) => {
            status.value = `Loading: ${megabytes(loaded)} of ${megabytes(total)}`;
          },
          read: (told) => {
            read = told;
          },
          step: (step) => steps.push(step),
        },
      );
      button.parentElement.remove();
      still.remove();
      begin(place, read, steps);
    } catch (error) {
      status.value = error.message;
      button.disabled = false;
    }
  };
}

function attentionViewer(place, read, steps) {
  const { gh, gw, m, s, heads, blocks, tokens } = read,
    n = gh * gw,
    words = [...PROMPT.matchAll(/\S+/g)].map((found) => [found[0], found.index]);
  const now = {
    word: words.reduce((a, b) => (b[0].length > a[0].length ? b : a))[1],
    step: Math.floor((steps.length + 1) / 2),
    block: -1,
  };
  const canvases = [make("canvas"), make("canvas")],
    captions = [make("figcaption"), make("figcaption")];
  const draw = () => {
    const step = steps[now.step - 1],
      [text] = words.find(([, at]) => at === now.word),
      seen = new Float32Array(n),
      picture = { rgba: step.rgba, width: 16 * gw, height: 16 * gh };
    const its = tokens.flatMap((token, j) => (token.from < now.word + text.length && token.to > now.word ? [j] : []));
    blocks.forEach((_, b) => {
      if (now.block < 0 || now.block === b) {
        for (let h = 0; h < heads; h++) {
          for (let i = 0; i < n; i++) {
            for (const j of its) seen[i] += step.attention[((b * heads + h) * s + m + i) * s + j];
          }
        }
      }
    });
    const mean = seen.reduce((a, b) => a + b) / n;
    paint(canvases[0], picture);
    overlay(
      canvases[1],
      picture,
      seen.map((value) => value / mean),
      gh,
      gw,
    );
    captions[0].textContent = `expected after step ${now.step}`;
    captions[1].textContent = `what attends to “${text}”: up to ${
      (Math.max(...seen) / mean).toFixed(1)
    } times the mean`;
  };
  place.append(
    toggles("word", words, now.word, (v) => {
      now.word = v;
      draw();
    }),
    make(
      "div.row",
      {},
      slider("step", { min: 1, max: steps.length, value: now.step }, (v) => {
        now.step = v;
        draw();
      }),
      slider(
        "block",
        { min: 0, max: blocks.length, value: 0 },
        (v) => {
          now.block = v - 1;
          draw();
        },
        (v) => (v ? blocks[v - 1] : "mean of all"),
      ),
    ),
    make("div.row.maps", {}, ...canvases.map((canvas, i) => figure(canvas, captions[i]))),
  );
  draw();
}

const ALIVE = { "schedule_explorer": scheduleExplorer, "rope_explorer": ropeExplorer, toy: showToy },
  LATER = { "attention_viewer": attentionViewer };
for (const still of document.querySelectorAll("[data-explorer]")) {
  const kind = still.dataset.explorer,
    place = make("div.live.explorer");
  still.after(place);
  if (LATER[kind]) onDemand(place, still, LATER[kind]);
  else {
    still.remove();
    ALIVE[kind](place);
  }
}
