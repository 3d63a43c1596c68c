// Small pictures of numbers: heat maps and lines.

const VIRIDIS = [
  "440154",
  "482878",
  "3e4989",
  "31688e",
  "26828e",
  "1f9e89",
  "35b779",
  "6ece58",
  "b5de2b",
  "fde725",
].map((hex) => [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16)));
const COLORS = ["var(--links)", "var(--red)", "var(--fg)"];

/** The color of a share from 0 to 1: [red, green, blue]. */
export function viridis(share) {
  const at = Math.min(Math.max(share, 0), 1) * (VIRIDIS.length - 1),
    i = Math.min(Math.floor(at), VIRIDIS.length - 2);
  return VIRIDIS[i].map((from, k) => from + (VIRIDIS[i + 1][k] - from) * (at - i));
}

/** Paints values (rows, columns), one pixel each; CSS makes them large. */
export function heat(canvas, values, rows, columns, { min = Math.min(...values), max = Math.max(...values) } = {}) {
  const rgba = new Uint8ClampedArray(rows * columns * 4).fill(255);
  for (let i = 0; i < rows * columns; i++) rgba.set(viridis((values[i] - min) / (max - min || 1)), 4 * i);
  canvas.width = columns;
  canvas.height = rows;
  canvas.classList.add("heat");
  canvas.getContext("2d").putImageData(new ImageData(rgba, columns, rows), 0, 0);
  return canvas;
}

/** Numbers (n, 4) of a picture, the darker the smaller a patch's value of (gh, gw) is: where something happens in it. */
export function overlay(canvas, { rgba, width, height }, values, gh, gw) {
  const max = Math.max(...values) || 1;
  const mixed = new Uint8ClampedArray(rgba.length).fill(255);
  for (let i = 0; i < width * height; i++) {
    const y = Math.floor(i / width),
      value = values[Math.floor((y * gh) / height) * gw + Math.floor(((i % width) * gw) / width)];
    const light = 0.25 + 0.75 * Math.min(Math.max(value / max, 0), 1);
    for (let c = 4 * i; c < 4 * i + 3; c++) mixed[c] = light * rgba[c];
  }
  canvas.width = width;
  canvas.height = height;
  canvas.getContext("2d").putImageData(new ImageData(mixed, width, height), 0, 0);
  return canvas;
}

const svg = (name, attributes, text = "") => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  return element;
};

/** Round numbers from a to b, about five. */
function ticks(a, b) {
  const rough = (b - a) / 4,
    unit = 10 ** Math.floor(Math.log10(rough)),
    step = unit * [1, 2, 5, 10].find((k) => k * unit >= rough);
  return Array.from(
    { length: Math.floor(b / step + 1e-9) - Math.ceil(a / step - 1e-9) + 1 },
    (_, i) => +((Math.ceil(a / step - 1e-9) + i) * step).toPrecision(6),
  );
}

/** A chart: series {name: [[x, y], …]}; dots: names of series without a line. arrows: [[x, y, x, y], …]. */
export function chart({
  title,
  x,
  y,
  series,
  xlim,
  ylim,
  dots = [],
  arrows = [],
  mark = null,
  floor = Infinity,
}) {
  const width = 380,
    height = 250;
  const all = Object.values(series).flat(),
    range = (k) => [Math.min(...all.map((p) => p[k])), Math.max(...all.map((p) => p[k]))];
  const [[x0, x1], [low, y1]] = [xlim ?? range(0), ylim ?? range(1)],
    y0 = Math.min(low, floor),
    left = 48,
    top = 26,
    right = 10,
    bottom = 40;
  const px = (v) => left + ((v - x0) / (x1 - x0 || 1)) * (width - left - right),
    py = (v) => height - bottom - ((v - y0) / (y1 - y0 || 1)) * (height - top - bottom);
  const root = svg("svg", {
    viewBox: `0 0 ${width} ${height}`,
    role: "img",
    class: "chart",
    "aria-label": `${title}: ${y} over ${x}`,
  });
  root.append(svg("text", { x: left, y: 14, class: "title" }, title));
  for (const v of ticks(x0, x1)) {
    root.append(
      svg("line", { x1: px(v), x2: px(v), y1: py(y0), y2: py(y1), class: "grid" }),
      svg("text", { x: px(v), y: height - bottom + 15, "text-anchor": "middle" }, v.toLocaleString("en")),
    );
  }
  for (const v of ticks(y0, y1)) {
    root.append(
      svg("line", { x1: px(x0), x2: px(x1), y1: py(v), y2: py(v), class: "grid" }),
      svg("text", { x: left - 6, y: py(v) + 4, "text-anchor": "end" }, v),
    );
  }
  root.append(
    svg("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, x),
    svg(
      "text",
      { x: 0, y: 0, "text-anchor": "middle", transform: `translate(11 ${(top + height - bottom) / 2}) rotate(-90)` },
      y,
    ),
  );
  if (mark !== null) root.append(svg("line", { x1: px(mark), x2: px(mark), y1: py(y0), y2: py(y1), class: "mark" }));
  const legend = svg("text", { x: width - right, y: 14, "text-anchor": "end" });
  root.append(legend);
  Object.entries(series).forEach(([name, points], i) => {
    const color = COLORS[i % COLORS.length];
    if (!dots.includes(name)) {
      root.append(
        svg("polyline", {
          points: points.map((p) => `${px(p[0])},${py(p[1])}`).join(" "),
          fill: "none",
          stroke: color,
          "stroke-width": 2,
        }),
      );
    }
    if (dots.includes(name) || points.length < 60) {
      for (const p of points) {
        root.append(svg("circle", { cx: px(p[0]), cy: py(p[1]), r: points.length > 60 ? 1 : 3, fill: color }));
      }
    }
    if (Object.keys(series).length > 1) legend.append(svg("tspan", { dx: 10, style: `fill: ${color}` }, name));
  });
  for (const [a, b, c, d] of arrows) {
    const angle = (Math.atan2(py(d) - py(b), px(c) - px(a)) * 180) / Math.PI;
    root.append(
      svg("line", { x1: px(a), y1: py(b), x2: px(c), y2: py(d), class: "arrow" }),
      svg("path", { d: "M0 0L-8 -4L-8 4Z", class: "head", transform: `translate(${px(c)} ${py(d)}) rotate(${angle})` }),
    );
  }
  return root;
}
