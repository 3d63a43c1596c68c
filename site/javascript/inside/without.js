// The same picture with a part taken away.
import { figure, make, paint, toggles } from "../page.js";
import { look } from "./look.js";
import { blockSlider, chip, headSlider, pictureOf } from "./parts.js";

/** Which of a double block's two gates. */
const gates = () =>
  toggles(
    "the gate of",
    [
      ["attention", 2],
      ["feed-forward", 5],
    ],
    look.now.gate,
    (v) => look.set({ gate: v }),
  );

/** The last picture of a run that is drawn again with a part taken away, one run after the other. */
let queue = Promise.resolve();
function drawWithout(run, cut) {
  const { turn } = look,
    wish = { prompt: run.prompt, seed: run.seed, steps: 4, cut };
  const { width, height } = pictureOf(run, run.steps[0]);
  queue = queue.then(async () => {
    if (turn !== look.turn) throw new Error("overtaken");
    let rgba;
    await look.painter.ask("draw", { ...wish, width, height }, { step: (step) => (rgba = step.rgba ?? rgba) });
    return { rgba, width, height };
  });
  const drawn = queue;
  queue = queue.catch(() => 0);
  return drawn;
}

export default {
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
      look.now.cut,
      (v) => {
        const others = look.runs[0].read.tokens.flatMap(({ mine }, j) => (mine && j !== look.now.token ? [j] : []));
        const mate = look.now.mate === look.now.token ? others[0] ?? look.now.token : look.now.mate;
        look.set({ cut: v, mate }, true);
      },
    ),
    ...(["block", "head", "gate"].includes(look.now.cut) ? [blockSlider(false)] : []),
    ...(look.now.cut === "head" ? [headSlider("head", look.runs[0].read.heads, false)] : []),
  ],
  show: (run) => {
    const { blocks, tokens, heads } = run.read,
      block = blocks[Math.max(look.now.block, 0)],
      head = Math.min(Math.max(look.now.head, 0), heads - 1),
      [token, mate] = [look.now.token, look.now.mate].map((i) => Math.min(Math.max(i, 0), tokens.length - 1)),
      word = (i) => `“${tokens[i].text.trim()}”`;
    const [cut, what] = {
      block: [{ block }, `without block “${block}”`],
      head: [{ block, head }, `head ${head + 1} of block “${block}” is silent`],
      gate: block.startsWith("double")
        ? [
          { shut: { block, gate: look.now.gate } },
          `the gate of the ${look.now.gate === 2 ? "attention" : "feed-forward part"} of block “${block}” is shut`,
        ]
        : [{ block }, `the one gate of block “${block}” is shut`],
      word: [{ token }, `deaf for ${word(token)}`],
      swap: [{ swap: [token, mate] }, `${word(token)} and ${word(mate)} in each other's place`],
      gates: [{ gates: true }, "every gate wide open, at 1"],
      clock: [{ clock: 0.5 }, "the network always believes that half of it is noise"],
    }[look.now.cut];
    const right = pictureOf(run, run.steps.at(-1)),
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
            ? chip(each, null, j === look.now[key], () => {
              const swapped = look.now[other] === j ? { [other]: look.now[key] } : {};
              look.set({ ...swapped, [key]: j });
            })
            : ""
        ),
      );
    return [
      ...(look.now.cut === "gate" && block.startsWith("double") ? [gates()] : []),
      ...(look.now.cut === "word" ? [chips("token")] : []),
      ...(look.now.cut === "swap" ? [chips("token", "mate"), chips("mate", "token")] : []),
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
};
