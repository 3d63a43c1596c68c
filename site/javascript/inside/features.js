// What the text encoder gives to the transformer.
import { heat } from "../charts.js";
import { figure, make } from "../page.js";
import { dot, norm, number, shown } from "./parts.js";

export default {
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
};
