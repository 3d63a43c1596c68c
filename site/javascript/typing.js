// Drawing while somebody types: which of the sentences that pass by are drawn, and when.

const PAUSE = 250; // milliseconds without a key, after which a sentence is drawn although its last word may not be complete

/** Follows what is typed into a field, while wanted() is true. A complete word or a pause asks for draft(), a quick
 *  picture; once nothing newer waits, finish() makes the good one. Both take the sentence, and draft() says whether it came
 *  to its end. There is one draft at a time: it is a single step, which cannot be cut short, so what is typed meanwhile
 *  comes next, and only the newest of it. Returns a function that forgets what waits. */
export function follow(field, { wanted, draft, finish }) {
  let text = field.value.trim(),
    waiting = 0, // for a pause: a timer
    newer = false, // was typed than what is being drafted
    drafting = false;
  const forget = () => {
    clearTimeout(waiting);
    waiting = 0;
    newer = false;
  };
  const begin = async () => {
    forget();
    newer = true;
    if (drafting) return;
    drafting = true;
    let asked, done = true;
    while (done && newer) {
      newer = false;
      asked = text;
      done = await draft(asked);
    }
    drafting = false;
    if (done && asked === text) finish(asked);
  };
  field.addEventListener("input", (event) => {
    const before = text,
      waited = waiting > 0;
    text = field.value.trim();
    if (text === before && !waited) return; // a space behind a word that is drawn already
    forget();
    if (!wanted() || !text) return;
    if (event.data?.endsWith(" ")) begin();
    else waiting = setTimeout(begin, PAUSE);
  });
  return forget;
}
