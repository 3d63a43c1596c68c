// What nano never learned of a request, as kleinlite/nano/limits.py says it; the words come from there.
import { LIMITS, SIZE } from "./model.js";

/** One sentence, or "". */
export function describeLimits(model, prompt, width, height) {
  const words = prompt.toLowerCase().split(/[\s.,!?;:…"“”()]+/u).filter(Boolean);
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
