// What each token takes from those before it.
import { make, slider } from "../page.js";
import { look } from "./look.js";
import { chip, headSlider, percent, shown } from "./parts.js";

export default {
  box: "reading",
  says: "Each token gathers from those before it. Choose one: the brighter another, the more of it is taken in by " +
    "this head.",
  chapter: ["03_text_encoder", 3],
  controls: () => [
    slider(
      "layer",
      { min: 1, max: look.runs[0].read.textLayers, value: look.now.layer + 1 },
      (v) => look.set({ layer: v - 1 }),
    ),
    headSlider("textHead", look.runs[0].read.textHeads),
  ],
  show: ({ read }) => {
    const { m, textHeads, textAttention, tokens } = read,
      at = Math.min(look.now.token, tokens.length - 1),
      row = new Float32Array(m);
    const heads = look.now.textHead < 0 ? [...Array(textHeads).keys()] : [look.now.textHead];
    for (const h of heads) {
      for (let j = 0; j < m; j++) {
        row[j] += textAttention[((look.now.layer * textHeads + h) * m + at) * m + j] / heads.length;
      }
    }
    const most = Math.max(...row);
    return [
      make(
        "p.chips",
        {},
        ...tokens.map((token, j) =>
          chip(token, j <= at ? row[j] / most : null, j === at, () => look.set({ token: j }))
        ),
      ),
      make(
        "p",
        {},
        `“${shown(tokens[at].text)}” takes most from “${shown(tokens[row.indexOf(most)].text)}”: ${percent(most)}.`,
      ),
    ];
  },
};
