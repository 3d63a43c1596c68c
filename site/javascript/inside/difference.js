// Two sentences, and how far apart they are after every block.
import { chart, overlay } from "../charts.js";
import { figure, make } from "../page.js";
import { look } from "./look.js";
import { blockSlider, minus, norm, pictureOf, stepOf } from "./parts.js";

export default {
  box: "difference",
  says: "Both began with the same noise: what differs comes from the words. The lines say how far the two are " +
    "apart after every block, in parts of their own size; the map, where in the picture, after the chosen " +
    "block.",
  chapter: ["05_transformer", 5],
  steps: true,
  controls: () => [blockSlider(false)],
  together: true,
  show: () => {
    const [a, b] = look.runs,
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
    const block = Math.max(look.now.block, 0),
      where = Float32Array.from({ length: gh * gw }, (_, i) => apart(block, m + i));
    return [
      make(
        "div.row.maps",
        {},
        chart({
          title: `Step ${look.now.step}`,
          x: "after block",
          y: "apart",
          mark: block + 1,
          series: {
            picture: blocks.map((_, k) => [k + 1, mean(k, m, s)]),
            words: blocks.map((_, k) => [k + 1, mean(k, 0, real)]),
          },
        }),
        ...look.runs.map((run) =>
          figure(
            overlay(
              make("canvas", { role: "img", "aria-label": `Where the pictures differ after ${blocks[block]}` }),
              pictureOf(run, stepOf(run)),
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
};
