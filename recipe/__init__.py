"""How the bundled weights were made, how they are judged, and the studies behind the model card. Not in the wheel."""
