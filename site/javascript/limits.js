// What nano never learned of a request, as kleinlite/nano/limits.py says it; the words come from there.
import { LIMITS, SIZE } from "./model.js";

/** One space for each run of blanks, and no character that nobody sees, as `fold_blanks` of inference/request.py. */
export function foldBlanks(text) {
  const seen = text.replace(/[\u200b\ufeff]/g, " ").replace(/\p{Cf}/gu, "");
  // deno-lint-ignore no-control-regex -- Python's str.split takes these four for blanks
  return seen.split(/[\p{White_Space}\x1c-\x1f]+/u).filter(Boolean).join(" ");
}

/** One sentence, or "". */
export function describeLimits(model, prompt, width, height) {
  const words = foldBlanks(prompt).toLowerCase().split(/[\s.,!?;:…"“”()]+/u).filter(Boolean);
  const unknown = [...new Set(words.filter((word) => !LIMITS.words.includes(word)))];
  const learned = unknown.slice(0, 3).map((word) => `"${word}"`);
  if (unknown.length > 3) learned.push(`${unknown.length - 3} more words`);
  words.slice(1).forEach((what, i) => {
    if (["background", "backdrop"].includes(what) && LIMITS.notBehind.includes(words[i])) {
      learned.push(`a ${words[i]} ${what}`);
    }
  });
  if (words.filter((word) => LIMITS.things.includes(word)).length > LIMITS.most) {
    learned.push(`more than ${LIMITS.most} things`);
  }
  if (width !== SIZE || height !== SIZE) learned.push(`another size than ${SIZE}×${SIZE}`);
  return learned.length ? `${model} never learned ${learned.join(", ")}: it draws ${LIMITS.draws}.` : "";
}
