"""Accuracy against epsilon, with clipped uploads and central noise; the study is studies/privacy.yaml."""

from fedjax_meta.front import program

app = program("privacy")

if __name__ == "__main__":
    app()
