import sys

from bench_serving.cli import main

sys.exit(main())
