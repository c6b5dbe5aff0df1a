"""moekit: composable, functional transforms for Mixture-of-Experts training."""
