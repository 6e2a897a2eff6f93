"""`python -m carpool_docs`: write docs/reference/."""

from carpool_docs.pages import write

if __name__ == "__main__":
    for file in write():
        print(f"wrote {file}")  # a command's answer
