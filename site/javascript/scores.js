// How true the maps of a caption's words are, measured by `python -m recipe.attention_score`: AUC by block
// and noise level, of the thing's own word and of the other thing's.
export const LEVELS = [0.2, 0.6, 0.9];
export const AUC = {"double 1": [[0.66, 0.71], [0.63, 0.69], [0.59, 0.67]], "double 2": [[0.9, 0.61], [0.89, 0.57], [0.9, 0.59]], "single 1": [[0.82, 0.5], [0.79, 0.34], [0.7, 0.16]], "single 2": [[0.8, 0.33], [0.82, 0.33], [0.81, 0.31]], "single 3": [[0.42, 0.25], [0.45, 0.28], [0.44, 0.3]], "single 4": [[0.28, 0.16], [0.32, 0.17], [0.34, 0.18]], "single 5": [[0.72, 0.18], [0.7, 0.13], [0.58, 0.1]]};
