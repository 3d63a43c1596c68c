// What a model never learned of a request, as kleinlite/nano/limits.py says it; the words come from there.
import { LIMITS, SIZE } from "./world.js";

/** One space for each run of blanks, and no character that nobody sees, as `fold_blanks` of inference/request.py. */
export function foldBlanks(text) {
  const seen = text.replace(/[\u200b\ufeff]/g, " ").replace(/\p{Cf}/gu, "");
  // deno-lint-ignore no-control-regex -- Python's str.split takes these four for blanks
  return seen.split(/[\p{White_Space}\x1c-\x1f]+/u).filter(Boolean).join(" ");
}

/** One sentence, or "". */
export function describeLimits(model, prompt, width, height) {
  const words = foldBlanks(prompt).toLowerCase().split(/[\s.,!?;:…"“”()]+/u).filter(Boolean);
  const pairs = words.slice(1).map((word, i) => `${words[i]} ${word}`),
    known = [
      ...LIMITS.words,
      ...pairs.filter((pair) => LIMITS.words.includes(pair)).flatMap((pair) => pair.split(" ")),
    ],
    unknown = [...new Set(words.filter((word) => !known.includes(word)))];
  const learned = unknown.slice(0, 3).map((word) => `"${word}"`);
  if (unknown.length > 3) learned.push(`${unknown.length - 3} more words`);
  learned.push(...pairs.filter((pair) => LIMITS.never.includes(pair)).map((pair) => `"${pair}"`));
  if (words.filter((word) => LIMITS.things.includes(word)).length > LIMITS.most) learned.push(LIMITS.crowd);
  if (width !== SIZE || height !== SIZE) learned.push(`another size than ${SIZE}×${SIZE}`);
  return learned.length ? `${model} never learned ${learned.join(", ")}: it draws ${LIMITS.draws}.` : "";
}
