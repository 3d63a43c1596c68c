// The pieces that a sentence is cut into.
import { make } from "../page.js";
import { shown } from "./parts.js";

export default {
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
};
