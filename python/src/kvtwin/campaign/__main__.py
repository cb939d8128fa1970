import sys

from kvtwin.campaign import main

if __name__ == "__main__":
    sys.exit(main())
