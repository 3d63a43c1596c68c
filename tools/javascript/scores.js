// How true the maps of a caption's words are, measured by `python -m tools.attention_score`: AUC by block
// and noise level, of the thing's own word and of the other thing's.
export const LEVELS = [0.2, 0.6, 0.9];
export const AUC = {"double 1": [[0.68, 0.72], [0.65, 0.71], [0.61, 0.68]], "double 2": [[0.91, 0.64], [0.9, 0.59], [0.9, 0.59]], "single 1": [[0.78, 0.43], [0.75, 0.26], [0.69, 0.15]], "single 2": [[0.78, 0.35], [0.8, 0.33], [0.81, 0.32]], "single 3": [[0.46, 0.29], [0.46, 0.3], [0.45, 0.3]], "single 4": [[0.29, 0.17], [0.32, 0.17], [0.34, 0.18]], "single 5": [[0.73, 0.21], [0.67, 0.14], [0.58, 0.11]]};
