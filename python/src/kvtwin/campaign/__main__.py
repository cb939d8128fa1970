import sys

try:
    from kvtwin.campaign import main
except ImportError as error:
    print(f"kvtwin.campaign: {error}: pip install 'kvtwin[campaign]'", file=sys.stderr)
    sys.exit(2)

if __name__ == "__main__":
    sys.exit(main())
