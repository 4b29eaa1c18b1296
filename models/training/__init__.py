"""How the bundled model `models/tiny-qwen-image` was made, from nothing and without a download."""
