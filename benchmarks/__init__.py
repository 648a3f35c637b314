"""Speed and tuning measurements, as ratios to peers in the same run; results are committed in results/."""
