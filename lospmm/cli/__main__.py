from lospmm.cli.main import main

main()
