// Where a patch looks, and where a word is.
import { overlay } from "../charts.js";
import { figure, make } from "../page.js";
import { SCORES } from "../world.js";
import { look } from "./look.js";
import { blockSlider, chip, headSlider, patches, patchSliders, percent, pictureOf, shown, stepOf } from "./parts.js";

/** What token i gives to every token, in the chosen block and head, or in their mean. */
function attention(run, i) {
  const { s, heads, blocks } = run.read,
    all = stepOf(run).attention,
    row = new Float32Array(s);
  let count = 0;
  for (let b = 0; b < blocks.length; b++) {
    for (let h = 0; h < heads; h++) {
      if ((look.now.block >= 0 && b !== look.now.block) || (look.now.head >= 0 && h !== look.now.head)) continue;
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
      if ((look.now.block >= 0 && b !== look.now.block) || (look.now.head >= 0 && h !== look.now.head)) continue;
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
  if (!SCORES) return "How true is the map of a word? That was measured for shapes alone.";
  if (look.now.block < 0 || look.now.head >= 0) {
    return "How true is the map of a word? Choose a block, with the mean of all heads, and its score is told here.";
  }
  const { t } = stepOf(run),
    { levels, auc } = SCORES,
    level = levels.reduce((best, its, i) => (Math.abs(its - t) < Math.abs(levels[best] - t) ? i : best), 0),
    [own, other] = auc[run.read.blocks[look.now.block]][level];
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

export default {
  box: "attention",
  says: "Every patch of the picture looks at all others, and at the words. Choose a patch: bright is where it " +
    "looks; words and picture share its whole attention.",
  chapter: ["05_transformer", 5],
  steps: true,
  controls: () => [blockSlider(), headSlider("head", look.runs[0].read.heads), ...patchSliders()],
  show: (run) => {
    const { m, gh, gw, tokens } = run.read,
      n = gh * gw,
      row = attention(run, m + (look.now.patch % n)),
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
            overlay(make("canvas"), pictureOf(run, stepOf(run)), there, gh, gw),
            `Where the patch in row ${Math.floor(look.now.patch / gw)}, column ${
              look.now.patch % gw
            } looks in the picture`,
          ),
          `${percent(share(there))} stays in the picture`,
        ),
        figure(
          overlay(make("canvas.word"), pictureOf(run, stepOf(run)), fit(run, look.now.token), gh, gw),
          `how well each patch's query fits the key of “${
            shown(tokens[Math.min(look.now.token, tokens.length - 1)].text)
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
            j === look.now.token,
            token.mine ? () => look.set({ token: j }) : undefined,
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
};
