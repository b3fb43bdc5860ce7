if(TARGET atoll_client)
  atoll_binary(atoll-worker
    SOURCES atoll_worker_main.cc worker_options_main.cc
    DEPS Atoll::client atoll_program atoll_worker_flags)
endif()
