// What is sent to others: a picture as a card, with its sentence and the address of the site, and the film of its steps.
import { paint, save } from "./page.js";

const WIDTH = 720,
  EDGE = 36,
  LINE = 36,
  STEP = 600, // milliseconds for which a film shows a step,
  END = 2400, // and its last picture
  ADDRESS = `${location.host}${new URL(".", location).pathname}`.replace(/\/$/, "");

/** A sentence in lines of a width. */
function wrap(pen, sentence, width) {
  const lines = [];
  for (const word of sentence.trim().split(/\s+/)) {
    const longer = lines.length ? `${lines.at(-1)} ${word}` : word;
    if (lines.length && pen.measureText(longer).width <= width) lines[lines.length - 1] = longer;
    else lines.push(word);
  }
  return lines;
}

/** A card without its picture, and a function that puts one there. */
function lay({ width, height }, sentence) {
  const card = document.createElement("canvas"),
    pen = card.getContext("2d"),
    words = `500 27px ${getComputedStyle(document.body).fontFamily}`,
    inner = WIDTH - 2 * EDGE,
    tall = Math.round(inner * height / width);
  pen.font = words;
  const lines = wrap(pen, sentence, inner);
  card.width = WIDTH;
  card.height = 2 * Math.round((tall + 2 * EDGE + (lines.length + 1.5) * LINE) / 2); // films have even sides
  pen.fillStyle = "white";
  pen.fillRect(0, 0, card.width, card.height);
  pen.font = words; // a canvas forgets it with its size
  pen.textBaseline = "top";
  pen.fillStyle = "#1e293b";
  lines.forEach((line, i) => pen.fillText(line, EDGE, EDGE + tall + 20 + i * LINE));
  pen.font = words.replace("27px", "20px");
  pen.fillStyle = "#64748b";
  pen.fillText(ADDRESS, EDGE, EDGE + tall + 30 + lines.length * LINE);
  pen.imageSmoothingQuality = "high";
  const put = (picture) => pen.drawImage(paint(document.createElement("canvas"), picture), EDGE, EDGE, inner, tall);
  return { card, put };
}

/** To another program where a phone offers that, otherwise into a file. */
async function send(blob, name) {
  const files = [new File([blob], name, { type: blob.type })];
  if (!matchMedia("(pointer: coarse)").matches || !navigator.canShare?.({ files })) return save(blob, name);
  try {
    await navigator.share({ files });
  } catch (error) {
    if (error.name !== "AbortError") throw error; // who closes the list of programs sends nothing
  }
}

/** One picture above its sentence. */
export async function sendCard(picture, sentence, name) {
  const { card, put } = lay(picture, sentence);
  put(picture);
  await send(await new Promise((made) => card.toBlob(made, "image/png")), `${name}-card.png`);
}

export const canFilm = () => "MediaRecorder" in self && "captureStream" in HTMLCanvasElement.prototype;

/** The pictures of a run, one after the other, above its sentence. */
export async function sendFilm(pictures, sentence, name) {
  const { card, put } = lay(pictures[0], sentence),
    mimeType = ["video/mp4", "video/webm"].find((type) => MediaRecorder.isTypeSupported(type)),
    recorder = new MediaRecorder(card.captureStream(20), { mimeType, videoBitsPerSecond: 4e6 }),
    parts = [],
    stopped = new Promise((done) => (recorder.onstop = done)),
    length = STEP * (pictures.length - 1) + END,
    began = performance.now();
  recorder.ondataavailable = ({ data }) => parts.push(data);
  recorder.start();
  for (let passed = 0; passed < length; passed = performance.now() - began) {
    put(pictures[Math.min(Math.floor(passed / STEP), pictures.length - 1)]); // again and again: a still canvas sends nothing
    await new Promise((later) => setTimeout(later, 50));
  }
  recorder.stop();
  await stopped;
  await send(new Blob(parts, { type: mimeType }), `${name}.${mimeType.slice(6)}`);
}
