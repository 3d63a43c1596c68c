"""Autoresearch: an agent changes train.py, trains for minutes, and judges that it cannot touch keep or discard."""
