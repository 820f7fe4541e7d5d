"""Run the demo: python -m hicache.bench.demo."""

from hicache.bench.demo.story import main

if __name__ == "__main__":
    main()
