// The page "Look inside": the book's diagram, alive, over the visitor's own sentence. Every box opens a view.
import { chart, heat, overlay, viridis } from "./charts.js";
import { BYTES, SCORES, SIZE, STORED } from "./model.js";
import { calm, field, figure, make, megabytes, paint, slider, toggles } from "./page.js";
import { Painter } from "./painter.js";

const page = document.querySelector("#live-inside");
const now = {
  view: "picture",
  step: 1,
  block: -1,
  head: -1,
  patch: 0,
  token: 0,
  layer: 0,
  textHead: -1,
  channel: 0,
  push: 4,
  row: 40,
  column: 4,
  stream: "img",
  cut: "block",
  gate: 2,
  mate: 4,
};
let painter,
  runs = [],
  asked = 0,
  written; // a timer

const number = (value) => value.toFixed(2),
  percent = (share) => `${(100 * share).toFixed(0)} %`;
const dot = (a, b) => a.reduce((sum, value, i) => sum + value * b[i], 0),
  norm = (a) => Math.sqrt(dot(a, a));
const minus = (a, b) => a.map((value, i) => value - b[i]);
const shown = (text) => text.replace(/\n/g, "↵").replace(/^ /, "␣");
const picture = (run, step) => ({ rgba: step.rgba, width: 16 * run.read.gw, height: 16 * run.read.gh });
const stepOf = (run) => run.steps[Math.min(now.step, run.steps.length) - 1];

/** A token that can be chosen; its shade is a share from 0 to 1. */
function chip(token, share, chosen, click) {
  const element = make(
    "button.chip",
    {
      type: "button",
      "aria-pressed": click && String(chosen),
      title: `id ${token.id}`,
      disabled: !click,
      onclick: click,
    },
    shown(token.text),
  );
  if (share !== null) {
    const color = viridis(share),
      light = 0.3 * color[0] + 0.59 * color[1] + 0.11 * color[2] > 140;
    element.style.background = `rgb(${color})`;
    element.style.color = light ? "#111" : "#fff";
  }
  return element;
}

/** A canvas of patches: a click chooses one. */
function patches(run, canvas, label) {
  const { gh, gw } = run.read,
    at = now.patch % (gh * gw),
    context = canvas.getContext("2d");
  context.strokeStyle = "#fff";
  context.lineWidth = 1.5;
  context.strokeRect((at % gw) * 16 + 1, Math.floor(at / gw) * 16 + 1, 14, 14);
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", label);
  canvas.classList.add("choose");
  canvas.onclick = (event) => {
    const box = canvas.getBoundingClientRect(),
      of = (share, count) => Math.min(count - 1, Math.max(0, Math.floor(share * count)));
    now.patch = of((event.clientY - box.top) / box.height, gh) * gw + of((event.clientX - box.left) / box.width, gw);
    refresh(true);
  };
  return canvas;
}

/** What token i gives to every token, in the chosen block and head, or in their mean. */
function attention(run, i) {
  const { s, heads, blocks } = run.read,
    all = stepOf(run).attention,
    row = new Float32Array(s);
  let count = 0;
  for (let b = 0; b < blocks.length; b++) {
    for (let h = 0; h < heads; h++) {
      if ((now.block >= 0 && b !== now.block) || (now.head >= 0 && h !== now.head)) continue;
      const at = ((b * heads + h) * s + i) * s;
      for (let j = 0; j < s; j++) row[j] += all[at + j];
      count++;
    }
  }
  return row.map((value) => value / count);
}

/** Query·key of every patch and a token, in the chosen block and head or in their mean; from 0, the least, upwards. */
function fit(run, token) {
  const { s, m, hd, heads, blocks } = run.read,
    { product } = stepOf(run),
    seen = new Float32Array(s - m);
  for (let b = 0; b < blocks.length; b++) {
    for (let h = 0; h < heads; h++) {
      if ((now.block >= 0 && b !== now.block) || (now.head >= 0 && h !== now.head)) continue;
      const at = 2 * (b * heads + h) * s * hd,
        key = at + (s + Math.min(token, m - 1)) * hd;
      for (let i = 0; i < s - m; i++) {
        for (let c = 0; c < hd; c++) seen[i] += product[at + (m + i) * hd + c] * product[key + c];
      }
    }
  }
  const least = Math.min(...seen);
  return seen.map((value) => value - least);
}

/** How true such a map is, as it was measured on drawings. */
function scoreOf(run) {
  if (now.block < 0 || now.head >= 0) {
    return "How true is the map of a word? Choose a block, with the mean of all heads, and its score is told here.";
  }
  const { t } = stepOf(run),
    { levels, auc } = SCORES,
    level = levels.reduce((best, its, i) => (Math.abs(its - t) < Math.abs(levels[best] - t) ? i : best), 0),
    [own, other] = auc[run.read.blocks[now.block]][level];
  return (
    `How true is the map of a word? In this block, at noise level ${
      levels[level]
    }, the word for a thing finds its patches with an AUC of ` +
    `${own.toFixed(2)}, and the word for the other thing finds them with ${
      other.toFixed(2)
    } (0.5 is chance, 1 perfect). Measured on 20 drawn scenes ` +
    "of two shapes, encoded and mixed with noise, where the true patches are those that change when the thing is left out."
  );
}

const blockSlider = (any = true) =>
  slider(
    "block",
    { min: any ? 0 : 1, max: runs[0].read.blocks.length, value: Math.max(now.block + 1, any ? 0 : 1) },
    (v) => {
      now.block = v - 1;
      refresh();
    },
    (v) => (v ? runs[0].read.blocks[v - 1] : "mean of all"),
  );
const headSlider = (key, heads, any = true) =>
  slider(
    "head",
    { min: any ? 0 : 1, max: heads, value: Math.max(now[key] + 1, any ? 0 : 1) },
    (v) => {
      now[key] = v - 1;
      refresh();
    },
    (v) => v || "mean of all",
  );

/** Which of a double block's two gates. */
const gates = () =>
  toggles(
    "the gate of",
    [
      ["attention", 2],
      ["feed-forward", 5],
    ],
    now.gate,
    (v) => {
      now.gate = v;
      refresh();
    },
  );

/** The patch, by keyboard. */
const patchSliders = () => {
  const { gh, gw } = runs[0].read,
    at = now.patch % (gh * gw),
    to = (row, column) => {
      now.patch = row * gw + column;
      refresh();
    };
  return [
    slider("row", { min: 0, max: gh - 1, value: Math.floor(at / gw) }, (v) => to(v, now.patch % gw)),
    slider("column", { min: 0, max: gw - 1, value: at % gw }, (v) => to(Math.floor((now.patch % (gh * gw)) / gw), v)),
  ];
};

const VIEWS = {
  tokens: {
    box: "tokens",
    says: "The sentence is cut into pieces that the tokenizer knows, each with a number; around it stands a chat " +
      "template, behind it padding.",
    chapter: ["03_text_encoder", 3],
    show: ({ read }) => [
      make(
        "p.tokens",
        {},
        ...read.tokens.map((token) =>
          make(token.mine ? "span.mine" : "span", {}, shown(token.text), make("sub", {}, String(token.id)))
        ),
      ),
      make("p", {}, `${read.tokens.length} tokens, filled up to ${read.most}.`),
    ],
  },
  reading: {
    box: "reading",
    says: "Each token gathers from those before it. Choose one: the brighter another, the more of it is taken in by " +
      "this head.",
    chapter: ["03_text_encoder", 3],
    controls: () => [
      slider("layer", { min: 1, max: runs[0].read.textLayers, value: now.layer + 1 }, (v) => {
        now.layer = v - 1;
        refresh();
      }),
      headSlider("textHead", runs[0].read.textHeads),
    ],
    show: ({ read }) => {
      const { m, textHeads, textAttention, tokens } = read,
        at = Math.min(now.token, tokens.length - 1),
        row = new Float32Array(m);
      const heads = now.textHead < 0 ? [...Array(textHeads).keys()] : [now.textHead];
      for (const h of heads) {
        for (let j = 0; j < m; j++) {
          row[j] += textAttention[((now.layer * textHeads + h) * m + at) * m + j] / heads.length;
        }
      }
      const most = Math.max(...row);
      return [
        make(
          "p.chips",
          {},
          ...tokens.map((token, j) =>
            chip(token, j <= at ? row[j] / most : null, j === at, () => {
              now.token = j;
              refresh();
            })
          ),
        ),
        make(
          "p",
          {},
          `“${shown(tokens[at].text)}” takes most from “${shown(tokens[row.indexOf(most)].text)}”: ${percent(most)}.`,
        ),
      ];
    },
  },
  features: {
    box: "features",
    says: "What three layers make of every token, side by side: the transformer reads this and nothing else. Rows " +
      "are tokens, columns are channels; the numbers say how alike a token's vector is from one tap to the next.",
    chapter: ["03_text_encoder", 3],
    show: ({ read }) => {
      const { taps, features, tokens, m } = read,
        d = features.length / m / taps.length,
        part = (i, k) => features.subarray((i * taps.length + k) * d, (i * taps.length + k + 1) * d);
      const maps = taps.map((tap, k) => {
        const values = tokens.flatMap((_, i) => [...part(i, k)]),
          size = 3 * Math.sqrt(dot(values, values) / values.length);
        return figure(
          heat(
            make("canvas.flat", { role: "img", "aria-label": `Features after layer ${tap}` }),
            values,
            tokens.length,
            d,
            { min: -size, max: size },
          ),
          `after layer ${tap}`,
        );
      });
      const alike = (i, k) => dot(part(i, k), part(i, k + 1)) / norm(part(i, k)) / norm(part(i, k + 1));
      const rows = tokens.flatMap((token, i) =>
        token.mine
          ? [
            make(
              "tr",
              {},
              make("td", {}, shown(token.text)),
              ...taps.slice(1).map((_, k) => make("td", {}, number(alike(i, k)))),
            ),
          ]
          : []
      );
      return [
        make("div.row.maps", {}, ...maps),
        make(
          "table",
          {},
          make(
            "thead",
            {},
            make(
              "tr",
              {},
              make("th", {}, "token"),
              ...taps.slice(1).map((tap, k) => make("th", {}, `layer ${taps[k]} and ${tap}`)),
            ),
          ),
          make("tbody", {}, ...rows),
        ),
      ];
    },
  },
  latents: {
    box: "latents",
    says: "The picture is made in a small grid of numbers, many channels deep. Each square is one channel of what is " +
      "expected from this step; choose one, push it, and see what it paints.",
    chapter: ["01_autoencoder", 1],
    steps: true,
    controls: () => [
      slider("channel", { min: 0, max: runs[0].read.channels - 1, value: now.channel }, (v) => {
        now.channel = v;
        refresh();
      }),
      slider(
        "push",
        { min: -6, max: 6, step: 0.5, value: now.push },
        (v) => {
          now.push = v;
          refresh();
        },
        (v) => v.toFixed(1),
      ),
    ],
    show: (run) => {
      const { gh, gw, channels } = run.read,
        step = stepOf(run),
        columns = 16,
        rows = Math.ceil(channels / columns),
        H = rows * (gh + 1),
        W = columns * (gw + 1),
        sheet = new Float32Array(H * W).fill(-3);
      for (let c = 0; c < channels; c++) {
        for (let i = 0; i < gh * gw; i++) {
          sheet[(Math.floor(c / columns) * (gh + 1) + Math.floor(i / gw)) * W + (c % columns) * (gw + 1) + (i % gw)] =
            step.clean[i * channels + c];
        }
      }
      const canvas = heat(
          make("canvas.sheet.choose", { role: "img", "aria-label": `${channels} channels` }),
          sheet,
          H,
          W,
          { min: -3, max: 3 },
        ),
        context = canvas.getContext("2d");
      context.strokeStyle = "#f33";
      context.strokeRect(
        (now.channel % columns) * (gw + 1) - 0.5,
        Math.floor(now.channel / columns) * (gh + 1) - 0.5,
        gw + 1,
        gh + 1,
      );
      canvas.onclick = (event) => {
        const box = canvas.getBoundingClientRect(),
          x = Math.floor(((event.clientX - box.left) / box.width) * columns),
          y = Math.floor(((event.clientY - box.top) / box.height) * rows);
        now.channel = Math.min(channels - 1, y * columns + x);
        refresh(true);
      };
      const painted = make("canvas", { role: "img", "aria-label": `Channel ${now.channel} pushed by ${now.push}` }),
        mine = asked,
        latents = step.clean.map((value, i) => (i % channels === now.channel ? value + now.push : value));
      paint(painted, picture(run, step));
      painter.ask("decode", { latents, gh, gw }).then(
        (after) => {
          if (mine === asked) paint(painted, after);
        },
        () => 0,
      );
      return [
        make(
          "div.row.maps",
          {},
          figure(canvas, `${channels} channels, −3 to 3`),
          figure(painted, `channel ${now.channel} pushed by ${now.push.toFixed(1)}`),
        ),
      ];
    },
  },
  attention: {
    box: "attention",
    says: "Every patch of the picture looks at all others, and at the words. Choose a patch: bright is where it " +
      "looks; words and picture share its whole attention.",
    chapter: ["05_transformer", 5],
    steps: true,
    controls: () => [blockSlider(), headSlider("head", runs[0].read.heads), ...patchSliders()],
    show: (run) => {
      const { m, gh, gw, tokens } = run.read,
        n = gh * gw,
        row = attention(run, m + (now.patch % n)),
        words = row.slice(0, tokens.length),
        there = row.slice(m, m + n);
      const share = (values) => values.reduce((a, b) => a + b, 0),
        most = Math.max(...words),
        mine = share(words.filter((_, j) => tokens[j].mine)),
        all = share(row.slice(0, m));
      return [
        make(
          "div.row.maps",
          {},
          figure(
            patches(
              run,
              overlay(make("canvas"), picture(run, stepOf(run)), there, gh, gw),
              `Where the patch in row ${Math.floor(now.patch / gw)}, column ${now.patch % gw} looks in the picture`,
            ),
            `${percent(share(there))} stays in the picture`,
          ),
          figure(
            overlay(make("canvas.word"), picture(run, stepOf(run)), fit(run, now.token), gh, gw),
            `how well each patch's query fits the key of “${
              shown(tokens[Math.min(now.token, tokens.length - 1)].text)
            }”`,
          ),
        ),
        make(
          "p.chips",
          {},
          ...tokens.map((token, j) =>
            chip(
              token,
              words[j] / most,
              j === now.token,
              token.mine
                ? () => {
                  now.token = j;
                  refresh();
                }
                : undefined,
            )
          ),
        ),
        make("p.score", {}, scoreOf(run)),
        make(
          "p",
          {},
          `${percent(mine)} goes to your words, ${percent(share(words) - mine)} to the template, ${
            percent(all - share(words))
          } to padding.`,
        ),
      ];
    },
  },
  product: {
    box: "one product",
    says:
      "Nearly all of the work is matrix products. This one asks how well each query fits each key: a cell is one row of " +
      "the queries times one row of the keys, number by number, summed. Point at a cell, or choose it with the arrow keys.",
    chapter: ["05_transformer", 5],
    steps: true,
    controls: () => [blockSlider(false), headSlider("head", runs[0].read.heads, false)],
    show: (run) => showProduct(run),
  },
  modulation: {
    box: "modulation",
    says: "The noise level t alone decides how strongly each part of a block is shifted, scaled and let through: the " +
      "mean size of these vectors, from pure noise (1) to the picture (0). The red line is this step.",
    chapter: ["05_transformer", 5],
    steps: true,
    controls: () => [
      toggles(
        "stream",
        [
          ["picture, double blocks", "img"],
          ["text, double blocks", "txt"],
          ["single blocks", "single"],
        ],
        now.stream,
        (v) => {
          now.stream = v;
          refresh();
        },
      ),
    ],
    together: true,
    show: (run = runs[0]) => {
      const { modulation, d } = run.read,
        count = modulation[0][1][now.stream].length / d,
        parts = ["shift", "scale", "gate"];
      const series = (first) =>
        Object.fromEntries(
          parts.map((name, k) => [
            name,
            modulation.map(([t, vectors]) => {
              const v = vectors[now.stream].subarray((first + k) * d, (first + k + 1) * d);
              return [t, norm(v) / Math.sqrt(d)];
            }),
          ]),
        );
      return [
        make(
          "div.row",
          {},
          ...(count > 3
            ? [
              ["attention", 0],
              ["MLP", 3],
            ]
            : [["attention and MLP", 0]]).map(([title, first]) =>
              chart({
                title,
                x: "noise level t",
                y: "root mean square",
                series: series(first),
                mark: stepOf(run).t,
                xlim: [0, 1],
                floor: 0,
              })
            ),
        ),
      ];
    },
  },
  velocity: {
    box: "velocity",
    says: "The answer of the transformer is a direction. From where the walk stands, the arrow leads to the picture " +
      "expected there; a step goes part of the way, and asks again.",
    chapter: ["04_sampling", 4],
    steps: true,
    show: (run) => {
      const {
          read: { start, gh, gw, channels },
          steps,
        } = run,
        end = steps.at(-1).latents,
        away = minus(start, end),
        far = norm(away),
        u = away.map((v) => v / far);
      const side = minus(steps[0].clean, end),
        along = dot(side, u),
        across = side.map((v, i) => v - along * u[i]),
        wide = norm(across) || 1,
        w = across.map((v) => v / wide);
      const flat = (x) => {
          const from = minus(x, end);
          return [dot(from, u), dot(from, w)];
        },
        walk = [start, ...steps.map((step) => step.latents)].map(flat),
        goals = steps.map((step) => flat(step.clean)),
        step = stepOf(run);
      const sizes = Float32Array.from(
        { length: gh * gw },
        (_, i) => norm(step.velocity.subarray(i * channels, (i + 1) * channels)),
      );
      return [
        make(
          "div.row.maps",
          {},
          chart({
            title: "The walk, seen from the side",
            x: "towards the noise",
            y: "across",
            series: { walk, expected: goals },
            dots: ["expected"],
            arrows: [[...walk[step.index], ...goals[step.index]]],
          }),
          figure(
            overlay(
              make("canvas", { role: "img", "aria-label": "Length of the velocity in each patch" }),
              picture(run, step),
              sizes,
              gh,
              gw,
            ),
            `length of the velocity, up to ${Math.max(...sizes).toFixed(1)}`,
          ),
        ),
      ];
    },
  },
  picture: {
    box: "picture",
    says: "The decoder makes pixels of latents: this is the picture that is expected from the step, and after the " +
      "last one the picture.",
    chapter: ["06_pipeline", 6],
    steps: true,
    show: (run) => [
      figure(
        paint(
          make("canvas.large", { role: "img", "aria-label": `Expected after step ${now.step}: ${run.prompt}` }),
          picture(run, stepOf(run)),
        ),
        `noise level ${number(stepOf(run).t)} to ${number(stepOf(run).tNext)}`,
      ),
    ],
  },
  without: {
    box: "what if",
    says:
      "What is a part good for? Take it away, or put two words in each other's place behind the text encoder, and see what the " +
      "same words and the same noise become. Left the picture as it was, right the other one.",
    chapter: ["05_transformer", 5],
    controls: () => [
      toggles(
        "take away",
        [
          ["a block", "block"],
          ["a head", "head"],
          ["a gate", "gate"],
          ["a word", "word"],
          ["the place of two words", "swap"],
          ["all gates", "gates"],
          ["the clock", "clock"],
        ],
        now.cut,
        (v) => {
          const others = runs[0].read.tokens.flatMap(({ mine }, j) => (mine && j !== now.token ? [j] : []));
          if (now.mate === now.token) now.mate = others[0] ?? now.token;
          now.cut = v;
          choose("without");
        },
      ),
      ...(["block", "head", "gate"].includes(now.cut) ? [blockSlider(false)] : []),
      ...(now.cut === "head" ? [headSlider("head", runs[0].read.heads, false)] : []),
    ],
    show: (run) => {
      const { blocks, tokens, heads } = run.read,
        block = blocks[Math.max(now.block, 0)],
        head = Math.min(Math.max(now.head, 0), heads - 1),
        [token, mate] = [now.token, now.mate].map((i) => Math.min(Math.max(i, 0), tokens.length - 1)),
        word = (i) => `“${tokens[i].text.trim()}”`;
      const [cut, what] = {
        block: [{ block }, `without block “${block}”`],
        head: [{ block, head }, `head ${head + 1} of block “${block}” is silent`],
        gate: block.startsWith("double")
          ? [
            { shut: { block, gate: now.gate } },
            `the gate of the ${now.gate === 2 ? "attention" : "feed-forward part"} of block “${block}” is shut`,
          ]
          : [{ block }, `the one gate of block “${block}” is shut`],
        word: [{ token }, `deaf for ${word(token)}`],
        swap: [{ swap: [token, mate] }, `${word(token)} and ${word(mate)} in each other's place`],
        gates: [{ gates: true }, "every gate wide open, at 1"],
        clock: [{ clock: 0.5 }, "the network always believes that half of it is noise"],
      }[now.cut];
      const right = picture(run, run.steps.at(-1)),
        spoiled = make("canvas.large", { role: "img", "aria-label": `${run.prompt}: ${what}` }),
        says = make("p", { "aria-live": "polite" }, "Drawing …");
      Object.assign(spoiled, { width: right.width, height: right.height }); // empty until it is drawn
      drawWithout(run, cut).then((after) => {
        paint(spoiled, after);
        const apart = right.rgba.reduce((sum, value, i) => sum + Math.abs(value - after.rgba[i]), 0);
        says.textContent = `The picture changes by ${
          (apart / right.rgba.length / 0.75).toFixed(1)
        } of 255 levels on average.`;
      }, () => 0); // overtaken by the next one
      const chips = (key, other) =>
        make(
          "p.chips",
          {},
          ...tokens.map((each, j) =>
            each.mine
              ? chip(each, null, j === now[key], () => {
                if (now[other] === j) now[other] = now[key];
                now[key] = j;
                refresh();
              })
              : ""
          ),
        );
      return [
        ...(now.cut === "gate" && block.startsWith("double") ? [gates()] : []),
        ...(now.cut === "word" ? [chips("token")] : []),
        ...(now.cut === "swap" ? [chips("token", "mate"), chips("mate", "token")] : []),
        make(
          "div.row.maps",
          {},
          figure(
            paint(make("canvas.large", { role: "img", "aria-label": run.prompt }), right),
            "as it was",
          ),
          figure(spoiled, what),
        ),
        says,
      ];
    },
  },
  difference: {
    box: "difference",
    says: "Both began with the same noise: what differs comes from the words. The lines say how far the two are " +
      "apart after every block, in parts of their own size; the map, where in the picture, after the chosen " +
      "block.",
    chapter: ["05_transformer", 5],
    steps: true,
    controls: () => [blockSlider(false)],
    together: true,
    show: () => {
      const [a, b] = runs,
        { s, d, m, gh, gw, blocks } = a.read,
        sa = stepOf(a).state,
        sb = stepOf(b).state,
        real = Math.min(a.read.tokens.length, b.read.tokens.length);
      const apart = (block, i) => {
        const at = (block * s + i) * d,
          x = sa.subarray(at, at + d),
          y = sb.subarray(at, at + d);
        return norm(minus(x, y)) / Math.sqrt(norm(x) * norm(y));
      };
      const mean = (block, from, to) => {
        let sum = 0;
        for (let i = from; i < to; i++) sum += apart(block, i);
        return sum / (to - from);
      };
      const block = Math.max(now.block, 0),
        where = Float32Array.from({ length: gh * gw }, (_, i) => apart(block, m + i));
      return [
        make(
          "div.row.maps",
          {},
          chart({
            title: `Step ${now.step}`,
            x: "after block",
            y: "apart",
            mark: block + 1,
            series: {
              picture: blocks.map((_, k) => [k + 1, mean(k, m, s)]),
              words: blocks.map((_, k) => [k + 1, mean(k, 0, real)]),
            },
          }),
          ...runs.map((run) =>
            figure(
              overlay(
                make("canvas", { role: "img", "aria-label": `Where the pictures differ after ${blocks[block]}` }),
                picture(run, stepOf(run)),
                where,
                gh,
                gw,
              ),
              run.prompt,
            )
          ),
        ),
      ];
    },
  },
};

/** Queries times keys of one head, as a map of cells, and below it the row and the column that the chosen cell comes from. */
function showProduct(run) {
  const { s, m, gw, hd, heads, tokens } = run.read,
    step = stepOf(run),
    head = Math.max(now.block, 0) * heads + Math.min(Math.max(now.head, 0), heads - 1),
    at = 2 * head * s * hd,
    row = (i, of) => step.product.subarray(at + (of * s + i) * hd, at + (of * s + i + 1) * hd),
    cells = Float32Array.from({ length: s * s }, (_, k) => dot(row(Math.floor(k / s), 0), row(k % s, 1)));
  const name = (i) =>
    i >= m
      ? `patch in row ${Math.floor((i - m) / gw)}, column ${(i - m) % gw}`
      : i < tokens.length
      ? `“${shown(tokens[i].text)}”`
      : "padding";
  const map = make("canvas.product.choose", {
      tabindex: 0,
      role: "application",
      "aria-label": `${s} × ${s} cells: arrow keys choose one, and its row, column and sum are told below`,
    }),
    strips = make("div.strips"),
    says = make("p.sum", { "aria-live": "polite" });
  const show = () => {
    const i = Math.min(Math.max(now.row, 0), s - 1),
      j = Math.min(Math.max(now.column, 0), s - 1),
      q = row(i, 0),
      k = row(j, 1),
      terms = q.map((value, c) => value * k[c]),
      most = (values) => values.reduce((a, b) => Math.max(a, Math.abs(b)), 1e-9),
      strip = (values, label) => {
        const size = most(values);
        return figure(heat(make("canvas.strip"), values, 1, hd, { min: -size, max: size }), label);
      };
    heat(map, cells, s, s);
    const context = map.getContext("2d");
    context.fillStyle = "rgba(255, 255, 255, 0.35)";
    context.fillRect(0, i, s, 1);
    context.fillRect(j, 0, 1, s);
    context.fillStyle = "#f33";
    context.fillRect(j, i, 1, 1);
    strips.replaceChildren(
      strip(q, `query: ${name(i)}, ${hd} numbers`),
      strip(k, `key: ${name(j)}, divided by √${hd}`),
      strip(terms, "their products, number by number"),
    );
    const term = (c) => `${q[c].toFixed(2)} · ${k[c].toFixed(2)}`.replace(/-/g, "−"),
      sum = terms.reduce((a, b) => a + b, 0),
      share = step.attention[(head * s + i) * s + j];
    says.textContent =
      `${term(0)} + ${term(1)} + ${term(2)} + … + ${term(hd - 1)} = ${sum.toFixed(2).replace("-", "−")}. ` +
      `Softmax over this row makes ${(100 * share).toFixed(1)} % of it.`;
  };
  const choose = (i, j) => {
    now.row = Math.min(Math.max(i, 0), s - 1);
    now.column = Math.min(Math.max(j, 0), s - 1);
    show();
    remember();
  };
  map.onpointermove = map.onpointerdown = (event) => {
    const box = map.getBoundingClientRect();
    choose(
      Math.floor(((event.clientY - box.top) / box.height) * s),
      Math.floor(((event.clientX - box.left) / box.width) * s),
    );
  };
  map.onkeydown = (event) => {
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!move) return;
    event.preventDefault();
    event.stopPropagation(); // to mdBook an arrow means the next page
    choose(now.row + move[0], now.column + move[1]);
  };
  show();
  return [
    make(
      "div.row.maps",
      {},
      make("figure", {}, make("figcaption", {}, `queries (down) × keys (across): ${m} of text, ${s - m} patches`), map),
      strips,
    ),
    says,
  ];
}

/** The last picture of a run that is drawn again with a part taken away, one run after the other. */
let queue = Promise.resolve();
function drawWithout(run, cut) {
  const mine = asked,
    wish = { prompt: run.prompt, seed: run.seed, steps: 4, model: "nano", guidance: 1, cut };
  const { width, height } = picture(run, run.steps[0]);
  queue = queue.then(async () => {
    if (mine !== asked) throw new Error("overtaken");
    let rgba;
    await painter.ask("draw", { ...wish, width, height }, { step: (step) => (rgba = step.rgba ?? rgba) });
    return { rgba, width, height };
  });
  const drawn = queue;
  queue = queue.catch(() => 0);
  return drawn;
}

// ---------------------------------------------------------------- the page

const prompt = make("input", { value: STORED.inside, required: true, autocomplete: "off" }),
  other = make("input", { value: "", placeholder: "a blue circle above a blue square", autocomplete: "off" });
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
  tour = make("button", { type: "button", onclick: () => visit(0) }, "Take the tour"),
  copy = make("button", { type: "button", disabled: true }, "Copy link");
const map = make("div.map", { role: "group", "aria-label": "The way from words to the picture" }),
  stepper = make("div.stepper"),
  film = make("ol.film", { "aria-label": "The picture expected after each step" }),
  controls = make("div.row"),
  says = make("p.says"),
  columns = make("div.columns");
page.replaceChildren(
  form,
  make("p.row", {}, tour, copy),
  make("p", {}, status),
  panel,
  map,
  stepper,
  says,
  controls,
  columns,
);

/** The view, into the address. */
function writeAddress() {
  const words = { prompt: runs[0].prompt, ...(runs[1] && { other: runs[1].prompt }), seed: seed.value };
  history.replaceState(null, "", `#${new URLSearchParams({ ...words, ...now })}`);
}

/** Soon: browsers refuse more than a hundred of these in half a minute. */
function remember() {
  clearTimeout(written);
  written = setTimeout(writeAddress, 300);
}

/** New children. The button that has the keyboard keeps it, if there is one in its place. */
function replace(place, children) {
  const at = [...place.querySelectorAll("button")].indexOf(document.activeElement);
  place.replaceChildren(...children);
  place.querySelectorAll("button")[at]?.focus({ preventScroll: true });
}

function refresh(withControls = false) {
  asked++;
  remember();
  const view = VIEWS[now.view];
  stepper.hidden = !view.steps;
  [...film.children].forEach((item, i) => {
    if (i + 1 === now.step) item.firstChild.setAttribute("aria-current", "step");
    else item.firstChild.removeAttribute("aria-current");
  });
  if (withControls) choose(now.view);
  else {
    replace(
      columns,
      view.together
        ? [make("div.column", {}, ...view.show())]
        : runs.map((run) =>
          make("div.column", {}, runs.length > 1 ? make("h3", {}, run.prompt) : "", ...view.show(run))
        ),
    );
  }
}

function choose(name) {
  now.view = name;
  const view = VIEWS[name],
    [file, chapter] = view.chapter;
  for (const box of map.querySelectorAll("button")) box.setAttribute("aria-pressed", String(box.dataset.view === name));
  says.replaceChildren(`${view.says} `, make("a", { href: `${file}.html` }, `Chapter ${chapter}`), ".");
  replace(controls, view.controls?.() ?? []);
  refresh();
}

/** The boxes and the arrows between them. Before a run a box draws first. */
function diagram() {
  const open = (name) => (runs.length ? choose(name) : form.reportValidity() && run({ ...linked(), view: name })),
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
        make("span.times", {}, `↻ ${runs[0]?.steps.length ?? 4} times`),
        box("latents"),
        arrow(),
        make("span.field", {}, box("attention"), box("modulation")),
        arrow(),
        box("velocity"),
      ),
      arrow(),
      box("picture"),
    ),
    make("div", {}, box("product"), box("without"), ...(runs.length > 1 ? [box("difference")] : [])),
  );
}

/** The film of the first run: a picture chooses its step, and so does the slider beside it. */
function showFilm() {
  const { steps } = runs[0],
    chosen = slider(
      "step",
      { min: 1, max: steps.length, value: now.step },
      (v) => {
        now.step = v;
        refresh();
      },
      (v) => `${v} of ${steps.length}, t = ${number(steps[v - 1].t)}`,
    ),
    input = chosen.querySelector("input");
  film.replaceChildren(
    ...steps.map((step, i) => {
      const small = make("canvas", { role: "img", "aria-label": `Expected after step ${i + 1}` }),
        click = () => {
          input.value = i + 1;
          input.oninput();
        };
      paint(small, picture(runs[0], step));
      return make("li", {}, make("button", { type: "button", "aria-label": `Step ${i + 1}`, onclick: click }, small));
    }),
  );
  stepper.replaceChildren(film, chosen);
}

/** Before anything is loaded: the film of the form's prompt, as it was when the site was made, and the boxes that it came
 *  through. */
function showStored() {
  const still = (step, as = "img") => {
    const [src, alt] = [`images/inside-${step}.png`, `Expected after step ${step}`];
    return make(as, { src, alt, width: SIZE, height: SIZE });
  };
  diagram();
  film.replaceChildren(...[1, 2, 3, 4].map((step) => make("li", {}, still(step))));
  stepper.replaceChildren(film);
  says.textContent =
    "A stored run: what is expected after each of four steps, and what came out. Press a box, and your own sentence " +
    "is drawn and opened there.";
  const caption = make("figcaption", {}, STORED.inside);
  columns.replaceChildren(make("div.column", {}, make("figure", {}, caption, still(4, "img.large"))));
}

/** Draw what the form asks for and show it, at `place`: what is set of `now`. Says whether that could be done. */
async function run(place) {
  if (open.disabled) return false; // at work already
  painter ??= new Painter();
  open.disabled = tour.disabled = true;
  let done = false;
  try {
    const drawn = [];
    for (const text of [prompt.value, other.value].filter((text) => text.trim())) {
      const run = { prompt: text, seed: BigInt(seed.value), steps: [] };
      status.value = `Drawing “${text}”`;
      await painter.ask(
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
    runs = drawn;
    const { gh, gw, tokens } = runs[0].read,
      mine = tokens.flatMap((token, i) => (token.mine ? [i] : []));
    Object.assign(now, {
      step: Math.min(2, runs[0].steps.length),
      patch: Math.floor(gh / 3) * gw + Math.floor(gw / 2),
      token: mine.at(-1) ?? 0,
      mate: mine[1] ?? mine[0] ?? 0,
      ...place,
    });
    if (!VIEWS[now.view] || (now.view === "difference" && runs.length < 2)) now.view = "picture";
    copy.disabled = false;
    diagram();
    showFilm();
    choose(now.view);
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
copy.onclick = () => {
  writeAddress();
  navigator.clipboard.writeText(location.href).then(
    () => {
      status.value = "The link to this view is in the clipboard.";
    },
    () => {
      status.value = "The link to this view is in the address bar.";
    },
  );
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
    other.value = "a blue circle above a blue square";
    seed.value = 7;
    if (!(await run({}))) return;
  }
  Object.assign(now, { block: -1, head: -1, ...STOPS[i] });
  showFilm();
  choose(now.view);
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
  for (const [name, value] of Object.entries(now)) {
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
