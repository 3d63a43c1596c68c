// Queries times keys, cell by cell.
import { heat } from "../charts.js";
import { figure, make } from "../page.js";
import { look } from "./look.js";
import { blockSlider, dot, headSlider, shown, stepOf } from "./parts.js";

/** Queries times keys of one head, as a map of cells, and below it the row and the column that the chosen cell comes from. */
function show(run) {
  const { s, m, gw, hd, heads, tokens } = run.read,
    step = stepOf(run),
    head = Math.max(look.now.block, 0) * heads + Math.min(Math.max(look.now.head, 0), heads - 1),
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
  const showCell = () => {
    const i = Math.min(Math.max(look.now.row, 0), s - 1),
      j = Math.min(Math.max(look.now.column, 0), s - 1),
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
    Object.assign(look.now, { row: Math.min(Math.max(i, 0), s - 1), column: Math.min(Math.max(j, 0), s - 1) });
    showCell();
    look.remember();
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
    choose(look.now.row + move[0], look.now.column + move[1]);
  };
  showCell();
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

export default {
  box: "one product",
  says:
    "Nearly all of the work is matrix products. This one asks how well each query fits each key: a cell is one row of " +
    "the queries times one row of the keys, number by number, summed. Point at a cell, or choose it with the arrow keys.",
  chapter: ["05_transformer", 5],
  steps: true,
  controls: () => [blockSlider(false), headSlider("head", look.runs[0].read.heads, false)],
  show,
};
