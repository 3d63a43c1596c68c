// Adapters for the model of klein.js (chapter 14).
import { readSafetensors } from "./klein.js";

/** Places an adapter's matrices beside the model's; they act in a walk that is drawn with it. */
export async function loadAdapter(klein, lora) {
  klein.kept = Infinity; // where the weights end is not known while more of them come
  for (const [name, tensor] of readSafetensors(await klein.read(`loras/${lora}.safetensors`))) {
    klein.keep(`${lora}/${name.replace(".", "/")}`, tensor);
  }
  klein.kept = klein.top;
}
